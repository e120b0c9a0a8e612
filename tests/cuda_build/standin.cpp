// A CUDA driver and runtime for a machine without a GPU, preloaded into torch's CUDA builds.
//
// There is one device, which says that it is an H100. Its memory is reserved memory of the host.
// Kernels, products and memsets do nothing, the first two count as launched, and what the host reads
// is zeros. Only what was copied to the device within the last 32 launches can be read again, up to
// 16 MiB: objects that ranks exchange. Collectives copy if there is one rank. Streams and events are
// done at once; an event takes 1 ms. An allocation beyond the memory of the card fails.
//
// So torch's dispatch, its allocator, its checks of arguments and its reports of waits are real, and
// so are the launchers of Triton, which load their binaries here. Speed, values, races between
// streams and errors of kernels are not.
//
// A symbol that is not here is looked up in the real library: libcudart then finds a driver without
// what it needs, and raises; other libraries may crash. cuda.h and cuda_runtime_api.h check the
// signatures of the functions that have a body.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t kMemory = 81079ul << 20;   // bytes, as torch reports them for an H100 with 80 GB
constexpr size_t kContext = 520ul << 20;    // of them, what a process takes before it allocates
constexpr size_t kGranularity = 2ul << 20;  // of allocations
constexpr size_t kLargestCopy = 16ul << 20;  // bytes to the device
constexpr long kKnownFor = 32;               // launches

std::mutex mutex;
std::map<const char*, size_t> on_device;  // start and size of what is reserved
std::map<const char*, size_t> pinned;     // memory of the host that is pinned
size_t allocated = kContext;
std::atomic<long> launched{0};

bool holds(const std::map<const char*, size_t>& ranges, const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = ranges.upper_bound(static_cast<const char*>(address));
  if (after == ranges.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

// Takes bytes of the device's memory; false if fewer are left.
bool take(size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  if (allocated + size > kMemory) return false;
  allocated += size;
  return true;
}

void give_back(size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  allocated -= size;
}

size_t rounded(size_t size) { return (size + kGranularity - 1) / kGranularity * kGranularity; }

// Addresses, aligned as an allocation is.
void* reserve(size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, size + kGranularity, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* start = reinterpret_cast<char*>(rounded(reinterpret_cast<size_t>(mapped)));
  munmap(mapped, start - static_cast<char*>(mapped));
  std::lock_guard<std::mutex> lock(mutex);
  on_device[start] = size;
  return start;
}

// Returns the size, 0 if there is no such range.
size_t unreserve(void* start) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = on_device.find(static_cast<char*>(start));
  if (found == on_device.end()) return 0;
  const size_t size = found->second;
  munmap(start, size);
  on_device.erase(found);
  return size;
}

// A copy to the device: its bytes, and the launches before it. By address in `copied`.
struct Copied {
  size_t size;
  long launched;
};
std::map<const char*, Copied> copied;

// True if all bytes at `source` were copied there at most kKnownFor launches ago.
bool is_known(const char* source, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = copied.upper_bound(source);
  if (after == copied.begin()) return false;
  --after;
  return source + size <= after->first + after->second.size &&
         launched - after->second.launched <= kKnownFor;
}

void copy(void* target, const void* source, size_t size) {
  const bool to_device = holds(on_device, target);
  if (size > kLargestCopy && to_device) return;
  const char* from = static_cast<const char*>(source);
  if (!holds(on_device, source) || is_known(from, size))
    std::memmove(target, source, size);
  else
    std::memset(target, 0, size);
  if (!to_device) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (copied.size() > 10000) copied.clear();
  copied[static_cast<char*>(target)] = {size, launched};
}

template <typename Handle>
void new_handle(Handle* handle) {
  static std::atomic<size_t> next{0x1000};
  *handle = reinterpret_cast<Handle>(next += 16);
}

int attribute(int which) {  // CUdevice_attribute; cudaDeviceAttr has the same numbers
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;         // kHz
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;  // kHz
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int standin_nothing() { return 0; }  // all these libraries call it success
API int standin_refuse() { return CUDA_ERROR_NOT_SUPPORTED; }
API int standin_launch() {
  ++launched;
  return 0;
}
// Launches of kernels, products and collectives so far, copies and memsets not among them.
API long standin_launches() { return launched; }
// Calls of FUNCTION get the answer of another one, whatever their arguments are.
#define SAME(other, function) \
  asm(".globl " #function "\n.type " #function ", @function\n.set " #function ", " #other);
#define NOTHING(function) SAME(standin_nothing, function)
#define LAUNCH(function) SAME(standin_launch, function)
#define REFUSED(function) SAME(standin_refuse, function)

// ---- runtime: device and memory ----

API cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  return *value = attribute(which), cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof(*p));
  std::strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = kMemory;
  p->major = 9;
  p->multiProcessorCount = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  p->warpSize = 32;
  p->sharedMemPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  p->sharedMemPerBlockOptin = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  p->sharedMemPerMultiprocessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->unifiedAddressing = 1;
  const int block[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
  std::memcpy(p->maxThreadsDim, block, sizeof(block));
  std::memcpy(p->maxGridSize, grid, sizeof(grid));
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  return std::strncpy(id, "0000:00:00.0", length), cudaSuccess;
}

API cudaError_t cudaMalloc(void** address, size_t size) {
  *address = nullptr;
  if (!take(rounded(size))) return cudaErrorMemoryAllocation;
  *address = reserve(rounded(size));
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}
API cudaError_t cudaFree(void* address) { return give_back(unreserve(address)), cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  return *free = kMemory - allocated, *total = kMemory, cudaSuccess;
}
API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned[static_cast<char*>(address)] = size, cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned.erase(static_cast<char*>(address)), cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  if (posix_memalign(address, 4096, size ? size : 1) != 0) return cudaErrorMemoryAllocation;
  return cudaHostRegister(*address, size, 0);
}
API cudaError_t cudaFreeHost(void* address) {
  cudaHostUnregister(address);
  return std::free(address), cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->type = holds(on_device, address) ? cudaMemoryTypeDevice
                     : holds(pinned, address)  ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  attributes->hostPointer = attributes->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  return copy(target, source, size), cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind,
                                cudaStream_t) {
  return copy(target, source, size), cudaSuccess;
}
NOTHING(cudaMemset)
NOTHING(cudaMemsetAsync)
NOTHING(cudaMemcpyPeerAsync)
NOTHING(cudaMemcpyToSymbol)

// ---- runtime: streams, events, kernels ----

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return new_handle(stream), cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream), cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  return *priority = 0, cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                         unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                         const cudaGraphEdgeData**, size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return new_handle(event), cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return new_handle(event), cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
  return function(argument), cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int,
                                                                       size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int,
                                                              size_t) {
  return *count = 2, cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  return *address = const_cast<void*>(symbol), cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  char later[96];  // cuda.h renames some functions
  std::strcat(std::strcpy(later, name), "_v2");
  *function = dlsym(RTLD_DEFAULT, later);
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamQuery)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord)
NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaEventQuery)
NOTHING(cudaEventSynchronize)
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
LAUNCH(cudaLaunchKernel)
LAUNCH(cudaLaunchKernelExC)
LAUNCH(cudaLaunchCooperativeKernel)

// What nvcc generates: binaries are registered when a library is loaded, and <<<>>> calls the rest.
API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API unsigned __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  return 0;
}
API cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  return *kernel = const_cast<void*>(function), cudaSuccess;
}
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaUnregisterFatBinary)
NOTHING(__cudaRegisterFunction)
NOTHING(__cudaRegisterVar)
NOTHING(__cudaRegisterManagedVar)
NOTHING(__cudaPushCallConfiguration)
LAUNCH(__cudaLaunchKernel)
API char __cudaInitModule(void**) { return 1; }

// ---- driver: what c10's allocator, Triton and NVRTC call ----

API CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  return *value = attribute(which), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  return *flags = 0, *is_active = 1, CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = reinterpret_cast<CUcontext>(0x1000), CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, 0); }
API CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** text) {
  return *text = "an error of the stand-in", CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return new_handle(module), CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return new_handle(module), CUDA_SUCCESS;
}
API CUresult cuModuleLoad(CUmodule* module, const char*) {
  return new_handle(module), CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return new_handle(function), CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                            : 0;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) {
  return *count = 2, CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  if (!holds(on_device, reinterpret_cast<void*>(address))) return CUDA_ERROR_INVALID_VALUE;
  return *static_cast<CUdeviceptr*>(value) = address, CUDA_SUCCESS;
}
NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxSetLimit)
NOTHING(cuModuleUnload)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuMemsetD32Async)
LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernelEx)
LAUNCH(cuLaunchCooperativeKernel)

// Segments that expand: addresses are reserved, and memory is mapped to them.
API CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  return *size = kGranularity, CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                                 unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(reserve(size));
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
  return unreserve(reinterpret_cast<void*>(address)), CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                         const CUmemAllocationProp*, unsigned long long) {
  if (!take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  return *handle = size, CUDA_SUCCESS;  // a handle is its size
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return give_back(handle), CUDA_SUCCESS;
}
NOTHING(cuMemMap)
NOTHING(cuMemUnmap)
NOTHING(cuMemSetAccess)

// c10 wants to find them, but needs them only to share memory with other processes and devices.
REFUSED(cuMemExportToShareableHandle)
REFUSED(cuMemImportFromShareableHandle)
REFUSED(cuMemGetAddressRange_v2)
REFUSED(cuMemGetAllocationPropertiesFromHandle)
REFUSED(cuMemRetainAllocationHandle)
REFUSED(cuMulticastAddDevice)
REFUSED(cuMulticastBindMem)
REFUSED(cuMulticastCreate)
REFUSED(cuMulticastUnbind)
REFUSED(cuStreamWriteValue32_v2)

// ---- NVRTC, which stands in front of the real one: what it compiles is empty ----

extern "C" {
API int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0; }
API int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                           const char* const*) {
  return new_handle(program), 0;
}
API int nvrtcGetLoweredName(void*, const char* expression, const char** name) {
  return *name = expression, 0;
}
API int nvrtcGetCUBINSize(void*, size_t* size) { return *size = 0, 0; }
API const char* nvrtcGetErrorString(int) { return "an error of the stand-in"; }
}
SAME(nvrtcGetCUBINSize, nvrtcGetPTXSize)
SAME(nvrtcGetCUBINSize, nvrtcGetProgramLogSize)
NOTHING(nvrtcAddNameExpression)
NOTHING(nvrtcCompileProgram)
NOTHING(nvrtcDestroyProgram)
NOTHING(nvrtcGetCUBIN)
NOTHING(nvrtcGetPTX)
NOTHING(nvrtcGetProgramLog)

// ---- NVML: torch counts devices with it, and asks it whether the memory has a fabric ----

extern "C" {
API int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 1, 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) {
  return new_handle(handle), 0;
}
}
NOTHING(nvmlInit_v2)
NOTHING(nvmlDeviceGetGpuFabricInfoV)  // its state stays 0: there is none
REFUSED(nvmlDeviceGetComputeRunningProcesses)
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSED(nvmlSystemGetCudaDriverVersion_v2)

// ---- cuBLAS ----

extern "C" {
API int cublasCreate_v2(void** handle) { return new_handle(handle), 0; }
API int cublasLtMatmulDescCreate(void** made, int, int) { return new_handle(made), 0; }
API int cublasLtMatmulPreferenceCreate(void** made) { return new_handle(made), 0; }
API int cublasLtMatrixLayoutCreate(void** made, int, long, long, long) {
  return new_handle(made), 0;
}
// One algorithm, which needs no workspace; torch has zeroed its description.
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*,
                                       int* count) {
  return *count = 1, 0;
}
}
NOTHING(cublasDestroy_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasGetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasGetPointerMode_v2)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
LAUNCH(cublasLtMatmul)
LAUNCH(cublasGemmEx)
LAUNCH(cublasSgemmEx)
LAUNCH(cublasGemmStridedBatchedEx)
LAUNCH(cublasSgemm_v2)
LAUNCH(cublasDgemm_v2)
LAUNCH(cublasSgemmStridedBatched)
LAUNCH(cublasDgemmStridedBatched)
LAUNCH(cublasSgemv_v2)
LAUNCH(cublasDgemv_v2)
LAUNCH(cublasDotEx)
LAUNCH(cublasSdot_v2)
LAUNCH(cublasDdot_v2)

// ---- cuDNN: a graph of attention ----

extern "C" {
API int cudnnCreate(void** handle) { return new_handle(handle), 0; }
API int cudnnGetStream(void*, void** stream) { return *stream = nullptr, 0; }
API int cudnnBackendCreateDescriptor(int, void** descriptor) { return new_handle(descriptor), 0; }
// One engine, which needs no workspace, has no knobs and no notes.
API int cudnnBackendGetAttribute(void*, int, int type, long, long* count, void* values) {
  const bool is_number = type == 3 || type == 23, is_descriptor = type == 15;
  if (is_number && values) std::memset(values, 0, type == 3 ? 8 : 4);
  if (count) *count = is_number || is_descriptor;
  return 0;
}
}
NOTHING(cudnnDestroy)
NOTHING(cudnnSetStream)
NOTHING(cudnnBackendSetAttribute)
NOTHING(cudnnBackendFinalize)
NOTHING(cudnnBackendDestroyDescriptor)
LAUNCH(cudnnBackendExecute)

// ---- NCCL: of several ranks only this one exists, and their collectives do nothing ----

namespace {

// A communicator is the number of ranks, and this one's.
int new_communicator(void** comm, size_t ranks, size_t rank) {
  return *comm = reinterpret_cast<void*>(ranks << 32 | rank << 1 | 1), 0;
}

int ranks_of(void* comm) { return reinterpret_cast<size_t>(comm) >> 32; }

int collective(void* target, const void* source, size_t count, int type, void* comm) {
  const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ncclDataType_t
  if (ranks_of(comm) == 1) copy(target, source, count * sizes[type]);
  return standin_launch();
}

}  // namespace

extern "C" {
struct ncclUniqueId { char bytes[128]; };
API int ncclGetUniqueId(ncclUniqueId* id) { return std::memset(id, 0, sizeof(*id)), 0; }
API int ncclCommInitRank(void** comm, int ranks, ncclUniqueId, int rank) {
  return new_communicator(comm, ranks, rank);
}
API int ncclCommInitRankConfig(void** comm, int ranks, ncclUniqueId, int rank, void*) {
  return new_communicator(comm, ranks, rank);
}
API int ncclCommSplit(void* whole, int, int, void** comm, void*) { return *comm = whole, 0; }
API int ncclCommCount(void* comm, int* count) { return *count = ranks_of(comm), 0; }
API int ncclCommUserRank(void* comm, int* rank) {
  return *rank = (reinterpret_cast<size_t>(comm) & 0xffffffff) >> 1, 0;
}
API int ncclCommGetAsyncError(void*, int* error) { return *error = 0, 0; }
API int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void*) {
  return collective(to, from, count, type, comm);
}
API int ncclAllReduce(const void* from, void* to, size_t count, int type, int, void* comm, void*) {
  return collective(to, from, count, type, comm);
}
API int ncclReduce(const void* from, void* to, size_t count, int type, int, int, void* comm,
                   void*) {
  return collective(to, from, count, type, comm);
}
API int ncclBroadcast(const void* from, void* to, size_t count, int type, int, void* comm, void*) {
  return collective(to, from, count, type, comm);
}
}
SAME(ncclAllReduce, ncclReduceScatter)
NOTHING(ncclCommDestroy)
NOTHING(ncclCommAbort)
NOTHING(ncclCommFinalize)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
LAUNCH(ncclBcast)
LAUNCH(ncclAlltoAll)
LAUNCH(ncclSend)
LAUNCH(ncclRecv)
