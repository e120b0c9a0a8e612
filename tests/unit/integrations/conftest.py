import pytest

from tests.unit.integrations.tinker_server import Http, server_config, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def url(folder, request):
    """The URL of a server with the flags FLAGS of the test's module."""
    with serving(server_config(folder, *getattr(request.module, "FLAGS", ()))) as url:
        yield url


@pytest.fixture
def run(url):
    """A new training run, which gives up the policy at its end."""
    client = Http(url).start()
    yield client
    client.finish()
