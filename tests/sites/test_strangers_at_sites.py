"""A stranger's models at sites of NVFlare: the bytes of the local engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from stranger_specs import ELSEWHERE, FOLDER, PAIRS, bytes_of, here, refused, spec

from fedstrata.base.errors import SpecError
from fedstrata.sites.simulator import simulate

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("servers")]


@pytest.fixture(scope="module")
def reachable() -> Iterator[None]:
    """Processes find the models like a package of their own that they installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDER, prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def at_sites(reachable: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], bytes]:
    """What one session of NVFlare's simulator leaves."""
    place = tmp_path_factory.mktemp("strangers")
    runs = [(spec(*pair, execution="per-client"), place / str(n)) for n, pair in enumerate(PAIRS)]
    histories = simulate(runs, sites=2)
    return {pair: bytes_of(history) for pair, history in zip(PAIRS, histories, strict=True)}


@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_nvflare_gives_the_bytes_of_the_local_engine(
    at_sites: dict[tuple[str, str], bytes], model: str, method: str
) -> None:
    assert at_sites[model, method] == here(model, method)


@pytest.mark.parametrize(("model", "method"), [pair for pair in ELSEWHERE if refused(*pair)][:1])
def test_nvflare_refuses_by_name(
    reachable: None, model: str, method: str, record_property: Callable[[str, object], None]
) -> None:
    with pytest.raises(SpecError, match="draws random numbers") as error:
        simulate([(spec(model, method, execution="per-client"), None)], sites=2)
    record_property("refused", str(error.value))
