"""hf: names, the choice of a quant, download from a stand-in server, and the cache without it."""

import pytest

from dali_gguf import hub
from dali_gguf.errors import InputError
from tests.hub_server import HubServer

ID = "owner/some-model-GGUF"
FILES = {
    "README.md": b"read me",
    "some-model-Q4_K_M.gguf": b"GGUF q4",
    "some-model-Q8_0.gguf": b"GGUF q8",
    "Q6_K/some-model-Q6_K-00001-of-00002.gguf": b"GGUF q6 first",
    "Q6_K/some-model-Q6_K-00002-of-00002.gguf": b"GGUF q6 second",
    "mmproj-some-model-F16.gguf": b"GGUF picture encoder",
}
CLOSED_PORT = "http://127.0.0.1:9"


@pytest.fixture
def server(monkeypatch):
    with HubServer(ID, FILES) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def choose(model: str, *files: str) -> hub.Choice:
    return hub.choose(hub.parse(model, None), list(files))


@pytest.mark.parametrize(
    "name", ["hf:", "hf:owner", "hf:owner/", "hf:a/b/c", "hf:a/b:", "hf:a b/c"]
)
def test_malformed_names(name):
    with pytest.raises(InputError, match="expected hf:owner/repo or hf:owner/repo:quant"):
        hub.fetch(name)


def test_is_hub_name():
    assert hub.is_hub_name("hf:a/b") and not hub.is_hub_name("models/hf.gguf")


def test_quants_by_name():
    files = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-UD-Q4_K_XL.gguf", "a.IQ4_XS.gguf", "a-mxfp4.gguf"]
    assert choose("hf:o/a:q4_k_m", *files).files == ("a-Q4_K_M.gguf",)
    assert choose("hf:o/a:Q4_K_XL", *files).files == ("a-UD-Q4_K_XL.gguf",)
    assert choose("hf:o/a:UD-Q4_K_XL", *files).files == ("a-UD-Q4_K_XL.gguf",)
    assert choose("hf:o/a:IQ4_XS", *files).files == ("a.IQ4_XS.gguf",)
    assert choose("hf:o/a:MXFP4", *files).files == ("a-mxfp4.gguf",)


def test_default_is_the_usual_quant():
    assert choose("hf:o/a", "a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-F16.gguf").quant == "Q4_K_M"
    assert choose("hf:o/a", "a-F16.gguf", "a-Q8_0.gguf").quant == "Q8_0"
    assert choose("hf:o/a", "Qwen3-30B.gguf").files == ("Qwen3-30B.gguf",)
    with pytest.raises(InputError, match="which quant.; there are IQ1_S, Q2_K_L"):
        choose("hf:o/a", "a-IQ1_S.gguf", "a-Q2_K_L.gguf")


def test_shards_are_one_choice_in_order():
    files = [f"b/a-Q4_0-0000{i}-of-00003.gguf" for i in (3, 1, 2)]
    assert choose("hf:o/a:Q4_0", *files).files == tuple(sorted(files))


def test_missing_quant_lists_what_is_there():
    with pytest.raises(InputError, match="hf:o/a: no Q5_K_M in it; there are F16, Q8_0; ask as in"):
        choose("hf:o/a:Q5_K_M", "a-Q8_0.gguf", "a-F16.gguf")


def test_safetensors_lead_to_convert():
    with pytest.raises(InputError, match="make one with: dali-gguf convert o/a$"):
        choose("hf:o/a", "model-00001-of-00002.safetensors", "config.json")
    with pytest.raises(InputError, match="no GGUF file in it; look for"):
        choose("hf:o/a", "README.md")


def test_download_then_cache(server, tmp_path, monkeypatch, capfd):
    path = hub.fetch(f"hf:{ID}:Q8_0", tmp_path)
    assert path.read_bytes() == b"GGUF q8" and path.name == "some-model-Q8_0.gguf"
    first = [asked for asked in server.asked if asked[0] == "GET" and "resolve" in asked[1]]
    assert len(first) == 1
    assert hub.fetch(f"hf:{ID}:Q8_0", tmp_path) == path
    assert [asked for asked in server.asked if asked[0] == "GET" and "resolve" in asked[1]] == first
    monkeypatch.setenv("HF_ENDPOINT", CLOSED_PORT)
    capfd.readouterr()
    assert hub.fetch(f"hf:{ID}:Q8_0", tmp_path) == path
    assert "using the cached some-model-Q8_0.gguf" in capfd.readouterr().err
    with pytest.raises(InputError, match="cannot be downloaded and is not in the cache"):
        hub.fetch(f"hf:{ID}:Q4_K_M", tmp_path)


def test_split_model_is_downloaded_whole(server, tmp_path):
    path = hub.fetch(f"hf:{ID}:Q6_K", tmp_path)
    assert path.name.endswith("-00001-of-00002.gguf")
    second = path.with_name(path.name.replace("00001-of", "00002-of"))
    assert second.read_bytes() == b"GGUF q6 second"


def test_no_such_repository(server, tmp_path):
    with pytest.raises(InputError, match="hf:owner/other: no such repository; check the name"):
        hub.fetch("hf:owner/other", tmp_path)


def test_no_connection_and_nothing_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", CLOSED_PORT)
    with pytest.raises(InputError, match="cannot be downloaded and is not in the cache") as raised:
        hub.fetch(f"hf:{ID}", tmp_path)
    assert "\n" not in str(raised.value)
