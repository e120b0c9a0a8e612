"""A batch script for Slurm."""

import shlex
import sys
from importlib.resources import files

from torchtitan.cluster.job import SERVER_PORT, ClusterJob

# A server that ends is started again; the trainer sends it the weights when it answers.
_SERVERS = """
serve() {
  while :; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --output "$logs/server-$1.log" --open-mode=append \\
      bash -c 'exec env "$@"' server @COMMAND@ || true
    echo "the server on $1 ended; starting it again"
    sleep 10
  done
}
urls=''
for host in "${hosts[@]:@TRAINERS@}"; do
  serve "$host" &
  urls+="${urls:+,}http://$host:@PORT@"
done
"""


def batch_script(job: ClusterJob) -> str:
    """Return the script to give to sbatch. Jobs under Slurm are not elastic."""
    command = job.command(sys.executable, job.config_file, job.server_arguments(["HOSTS"]))
    urls = shlex.quote(f"http://HOSTS:{SERVER_PORT}")
    variables = [f"{name}={shlex.quote(value)}" for name, value in job.environment.items()]
    values = {
        "SERVERS": _SERVERS if job.servers else "",
        "COMMAND": " ".join(command).replace(urls, '"$urls"'),
        "NAME": job.name,
        "NODES": job.max_nodes + job.servers,
        "TRAINERS": job.max_nodes,
        "RANKS": job.ranks_per_node,
        "WORLD_SIZE": job.max_nodes * job.ranks_per_node,
        "GPUS": job.gpus,
        "CPUS": job.cpus,
        "GRACE": job.grace_seconds,
        "MAX_RESTARTS": job.max_restarts,
        "ENVIRONMENT": " ".join(variables),
        "PORT": SERVER_PORT,
    }
    script = files("torchtitan.cluster").joinpath("train.sbatch").read_text()
    script = script.replace("@SERVERS@", values.pop("SERVERS"))
    if job.servers:
        script = script.replace("server @COMMAND@", f"server {job.server_command(sys.executable)}")
    for name, value in values.items():
        script = script.replace(f"@{name}@", str(value))
    if not job.config.checkpoint.enable:  # another attempt would begin at step 0
        script = script.replace("#SBATCH --requeue", "#SBATCH --no-requeue")
    if not job.gpus:
        script = script.replace("#SBATCH --gpus-per-node=0\n", "")
    return script
