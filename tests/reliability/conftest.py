import pytest

from tests.reliability.wheel import install


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The variables of `wheel.install`."""
    return install(tmp_path_factory.mktemp("wheel"))
