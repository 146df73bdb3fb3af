"""The run command on a few-kilobyte model, computed by the numpy device."""

import io
import json
from pathlib import Path

import pytest

from dali_gguf import engine as engine_module
from dali_gguf.cli import main
from dali_gguf.cli import run as run_module
from dali_gguf.engine import Engine
from dali_gguf.sampler import SamplingParams
from tests.hub_server import HubServer
from tests.numpy_device import NumpyDevice
from tests.small_gguf import small_keys, write_small
from tests.vocabulary_file import N_VOCAB

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if messages[-1].content == 'boom' %}{{ raise_exception('no booms') }}{% endif %}"
)
GREEDY = ["--greedy", "-n", "8"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return str(write_small(tmp_path_factory.mktemp("plain") / "small.gguf"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    def keys(writer):
        small_keys(writer)
        writer.add_chat_template(TEMPLATE)

    return str(write_small(tmp_path_factory.mktemp("chat") / "chat.gguf", keys=keys))


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    monkeypatch.setattr(engine_module.devices, "open_device", lambda *_: NumpyDevice())
    monkeypatch.setattr("dali_gguf.kernels.ahead.missing", lambda types: [])


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["run", *arguments])
    return code, *capsys.readouterr()


def refused(capsys, *arguments: str) -> str:
    """The one line of an error; nothing on stdout."""
    try:
        code, out, err = run(capsys, *arguments)
    except SystemExit as stopped:
        code, (out, err) = stopped.code, capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1, err
    return err


def generated(path: str, prompt: str, n: int = 8) -> str:
    with Engine(path) as engine:
        return "".join(engine.generate(prompt, SamplingParams(temperature=0, max_tokens=n)))


def test_text_on_stdout_figures_on_stderr(plain, capsys):
    code, out, err = run(capsys, plain, "-p", "w1 w2", *GREEDY)
    assert code == 0
    assert out == generated(plain, "w1 w2") + "\n"
    assert err.count("\n") == 1 and "prefill" in err and "decode" in err


def test_model_as_option_and_twice_and_unknown_type(plain, chat, capsys):
    assert run(capsys, "-m", plain, "-p", "w1", *GREEDY)[0] == 0
    assert "'q3' is not known" in refused(capsys, plain, "-p", "w1", "--kv-type", "q3")
    assert "two models" in refused(capsys, plain, "-m", chat, "-p", "w1")


def test_model_from_the_hub(plain, capsys, monkeypatch, tmp_path):
    files = {"small-Q8_0.gguf": Path(plain).read_bytes()}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with HubServer("owner/small", files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        code, out, _ = run(capsys, "hf:owner/small:Q8_0", "-p", "w1 w2", *GREEDY)
        assert (code, out) == (0, generated(plain, "w1 w2") + "\n")
        assert "there are Q8_0" in refused(capsys, "-m", "hf:owner/small:Q4_0", "-p", "w1")


def test_json_is_one_object(plain, capsys):
    code, out, err = run(capsys, plain, "-p", "w1 w2", "--json", *GREEDY)
    answer = json.loads(out)
    assert code == 0 and err == ""
    assert answer["text"] == generated(plain, "w1 w2") and answer["prompt"] == "w1 w2"
    assert answer["finish"] == "length" and answer["prefill_tokens"] > 2


def test_prompt_goes_through_the_chat_template_once(chat, capsys):
    code, _, err = run(capsys, chat, "-p", "w1", "--verbose-prompt", *GREEDY)
    with Engine(chat) as engine:
        ids = engine.tokenizer.encode("<s>user:w1;", parse_special=True)
    shown = [int(line.split(" -> ")[0]) for line in err.splitlines() if " -> " in line]
    assert code == 0 and shown == ids and ids.count(1) == 1


def test_raw_and_system_prompt(chat, plain, capsys):
    _, out, _ = run(capsys, chat, "-p", "w1", "--raw", *GREEDY)
    assert out == generated(chat, "w1") + "\n"
    _, out, _ = run(capsys, chat, "-p", "w1", "-sys", "w2", *GREEDY)
    with Engine(chat) as engine:
        ids = engine.tokenizer.encode("<s>system:w2;user:w1;", parse_special=True)
        params = SamplingParams(temperature=0, max_tokens=8)
        assert out == "".join(engine.generate(ids, params)) + "\n"
    assert "-sys needs a chat template" in refused(capsys, plain, "-p", "w1", "-sys", "w2")


def test_broken_template_is_one_line(chat, capsys):
    assert "chat.gguf: the chat template fails: no booms" in refused(capsys, chat, "-p", "boom")


def test_prompt_from_stdin_and_file(plain, capsys, monkeypatch, tmp_path):
    expected = generated(plain, "w1 w2") + "\n"
    for arguments in (["-p", "-"], ["-f", "-"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\n"))
        assert run(capsys, plain, *arguments, *GREEDY)[1] == expected
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"w1 w2\n")
    assert run(capsys, plain, "-f", str(file), *GREEDY)[1] == expected


def test_no_prompt(plain, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "no prompt" in refused(capsys, plain)
    assert "give one prompt" in refused(capsys, plain, "-p", "a", "-f", "b")
    assert "No such file" in refused(capsys, plain, "-f", str(tmp_path / "none"))
    assert "Is a directory" in refused(capsys, plain, "-f", str(tmp_path))


def test_escapes(plain, capsys):
    expected = generated(plain, "w1\nw2A") + "\n"
    assert run(capsys, plain, "-p", r"w1\nw2\x41", *GREEDY)[1] == expected
    expected = generated(plain, r"w1\nw2") + "\n"
    assert run(capsys, plain, "-p", r"w1\nw2", "--no-escape", *GREEDY)[1] == expected


def test_stop_ends_before_the_text(plain, capsys):
    text = generated(plain, "w1 w2", 12)
    stop = text[len(text) // 2 :][:2]
    code, out, err = run(capsys, plain, "-p", "w1 w2", "--greedy", "-n", "12", "--stop", stop)
    assert out == text[: text.index(stop)] + "\n" and "stopped by stop" in err


def test_seed_repeats_and_until_the_context_is_full(plain, capsys):
    arguments = [plain, "-p", "w1", "-s", "7", "-c", "40", "-n", "-2"]
    first = run(capsys, *arguments)
    assert first[1] == run(capsys, *arguments)[1] and "stopped by context" in first[2]
    assert first[1] != run(capsys, *arguments, "-s", "8")[1]


def test_ignore_eos_goes_on_to_the_end(plain, capsys, monkeypatch):
    monkeypatch.setattr("dali_gguf.tokenizer.Tokenizer.end_ids", frozenset(range(N_VOCAB)))
    arguments = [plain, "-p", "w1", "--greedy", "-n", "5"]
    assert "decode 0 tokens" in run(capsys, *arguments)[2]
    code, out, err = run(capsys, *arguments, "--ignore-eos")
    assert code == 0 and "decode 4 tokens" in err and "stopped by length" in err


def test_ctrl_c_shows_what_there_is(plain, capsys, monkeypatch):
    generate, text = Engine.generate, generated(plain, "w1")

    def interrupted(self, prompt, params):
        pieces = generate(self, prompt, params)
        yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    code, out, err = run(capsys, plain, "-p", "w1", *GREEDY)
    assert code == 130 and text.startswith(out.removesuffix("\n"))
    assert "stopped by interrupted" in err and err.count("\n") == 1


def test_ctrl_c_while_loading(plain, capsys, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "compile_kernels", interrupted)
    assert run(capsys, plain, "-p", "w1") == (130, "", "dali-gguf: interrupted\n")


def test_first_run_says_once_that_kernels_are_compiled(plain, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("dali_gguf.kernels.ahead.missing", lambda types: ["layer"])
    monkeypatch.setattr("dali_gguf.kernels.ahead.compile_all", lambda types: None)
    assert "compiling kernels" in run(capsys, plain, "-p", "w1", *GREEDY)[2]
    assert "no such file" in refused(capsys, str(tmp_path / "none.gguf"), "-p", "w1")


def test_color_shows_the_prompt(plain, capsys):
    _, out, _ = run(capsys, plain, "-p", "w1 w2", "--color", *GREEDY)
    assert out == f"\x1b[33mw1 w2\x1b[0m{generated(plain, 'w1 w2')}\n"
    _, out, _ = run(capsys, plain, "-p", "w1 w2", "--color", "auto", *GREEDY)
    assert "\x1b" not in out


def test_figures_to_a_file(plain, capsys, tmp_path):
    file = tmp_path / "stats.json"
    code, _, err = run(capsys, plain, "-p", "w1", "--stats-json", str(file), "--stats", *GREEDY)
    assert code == 0 and json.loads(file.read_text())["decode_tokens"] >= 7
    assert "decode_tokens" in err


def test_a_file_for_figures_without_a_place_is_refused_before_the_text(plain, capsys, tmp_path):
    nowhere = str(tmp_path / "none" / "stats.json")
    assert "no folder" in refused(capsys, plain, "-p", "w1", "--stats-json", nowhere, *GREEDY)
    assert "a folder" in refused(capsys, plain, "-p", "w1", "--stats-json", str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        "--temp -1", "--temp nan", "--temp inf", "--temp x", "--top-k -1", "--top-p 1.1",
        "--top-p -1", "--min-p 2", "-n -3", "-n 1.5", "-s -2", "-t 0", "-t x", "-c -1", "-b 0",
        "--vram 0", "--vram -1", "--ram abc", "--repeat-penalty 0", "--repeat-penalty nan",
        "--presence-penalty inf", "--color maybe", "--nonsense", "--repeat-last-n -2",
    ],
)  # fmt: skip
def test_wrong_flags_are_one_line(plain, capsys, arguments):
    flag = arguments.split()[0]
    error = refused(capsys, plain, "-p", "w1", *arguments.split())
    assert flag.strip("-").split("-")[0] in error


def test_an_unknown_flag_points_at_the_help_of_its_command(plain, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", plain, "-p", "a", "--bogus"])
    wanted = "dali-gguf run: unrecognized arguments: --bogus; see dali-gguf run --help\n"
    assert capsys.readouterr().err == wanted


def test_prompt_longer_than_the_context(plain, capsys):
    error = refused(capsys, plain, "-p", "w1 " * 200, "-c", "32")
    assert "32" in error or "31" in error


def test_missing_model_and_unknown_architecture(capsys, tmp_path):
    assert "none.gguf: no such file" in refused(capsys, str(tmp_path / "none.gguf"), "-p", "x")
    (tmp_path / "text.gguf").write_text("this is no model")
    assert "text.gguf" in refused(capsys, str(tmp_path / "text.gguf"), "-p", "x")
    assert "expected hf:owner/repo" in refused(capsys, "hf:nonsense", "-p", "x")
