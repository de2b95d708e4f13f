"""`gruppo VERB ...`: finds the verb, imports only its module, and turns errors into exit codes."""

import atexit
import difflib
import importlib
import io
import os
import signal
import sys
import traceback

from gruppo import __version__
from gruppo.errors import GruppoError, InputError, require_train
from gruppo.process.child import stop_with_launcher
from gruppo.process.streams import printable, safe_streams
from gruppo.run.signals import STOPPED, stop_signals

OVERVIEW = """\
gruppo: group-relative policy optimization of language models

  gruppo demo                          a tiny model learns to add in a minute; no GPU, no network
  gruppo train --config run.yaml       train a model on your data with your reward
  gruppo resume runs/my-run            go on after a stop, a crash or a kill, as if nothing had happened
  gruppo report runs/my-run            one HTML page: charts, the ledger of tokens, every completion token by token
  gruppo view runs/my-run              the same page live, while the run goes on
  gruppo eval runs/my-run              held-out accuracy and pass@k, with confidence intervals
  gruppo sample --model DIR "47+85="   completions of a prompt
  gruppo export runs/my-run OUT        the trained model for transformers, PEFT or vLLM (--merge folds LoRA in)
  gruppo doctor runs/my-run            what is likely wrong with a run, the evidence, and the option to change
  gruppo doctor                        versions, devices, and a self-test of this installation
  gruppo replay runs/my-run --step 5 --loss gspo
                                       other losses and advantages on the rollouts of a step
  gruppo losses [NAME]                 every loss with its parts and paper, or the formula of one
  gruppo recipes                       what papers trained with: --recipe dapo, gspo, ... as a start
  gruppo convert trl config.yaml       the configuration of TRL, Open Instruct or Twinkle as one of gruppo
  gruppo data check FILE               what a data set holds and which rows would be dropped
  gruppo reward check my_module:reward --data FILE
                                       what a reward gives to good, bad, empty and huge completions

A first run of your own, from nothing to a trained adapter:

  gruppo data check problems.jsonl
  gruppo reward check number_match --data problems.jsonl
  gruppo train --model Qwen/Qwen3-0.6B --data problems.jsonl --rewards number_match \\
      --lora --lr 1e-5 --steps 100 --output runs/first

`gruppo VERB --help` explains each option.
"""

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended, as shells have it."""

# verb: (module, function)
VERBS = {
    ("demo",): ("gruppo.cli.demo", "demo"),
    ("train",): ("gruppo.cli.train", "train"),
    ("resume",): ("gruppo.cli.train", "resume"),
    ("eval",): ("gruppo.cli.models", "evaluate_model"),
    ("sample",): ("gruppo.cli.models", "sample"),
    ("export",): ("gruppo.cli.models", "export"),
    ("losses",): ("gruppo.cli.listing", "losses"),
    ("data", "check"): ("gruppo.cli.data_check", "data_check"),
    ("reward", "check"): ("gruppo.cli.reward_check", "reward_check"),
    ("recipes",): ("gruppo.cli.listing", "recipes"),
    ("convert",): ("gruppo.cli.convert", "convert"),
    ("report",): ("gruppo.cli.report", "report"),
    ("view",): ("gruppo.cli.report", "view"),
    ("doctor",): ("gruppo.cli.doctor", "doctor"),
    ("replay",): ("gruppo.cli.replay", "replay_step"),
}


def main(argv: list[str] | None = None) -> None:
    """The `gruppo` command."""
    arguments = sys.argv[1:] if argv is None else argv
    _make_safe_to_print()
    output, errors = sys.stdout, sys.stderr  # a module of the user's may replace them
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank: before the imports, which take long
        stop_with_launcher()
    try:
        try:
            code = run(arguments)
        except SystemExit as ended:  # the help of a verb, or SIGTERM
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        output.flush()
    except GruppoError as error:
        _complain(f"gruppo: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        _drop_output()
        code = 141
    except Exception as error:
        if isinstance(error, OSError) and not _can_print():
            _complain(f"gruppo: standard output cannot be written: {error.strerror}; free some space, or redirect it\n")
            _drop_output()
            code = InputError.exit_code
        else:  # a defect; its text may quote a model, a data row or a file
            _complain(traceback.format_exc())
            code = 1
    if code in (STOPPED, INTERRUPTED):  # a signal that follows the first must not replace the code by its own
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)
        # What still waits for a thread is left by another Ctrl-C; what comes after takes no time.
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # torch's threads of a rank may outlive the interpreter, and then abort a process that has done its work.
        atexit._run_exitfuncs()
        output.flush()
        if errors is not None:
            errors.flush()
        os._exit(code)
    sys.exit(code)


def _make_safe_to_print() -> None:
    """Make printing safe: neither a character that the terminal cannot show nor a closed output may end a run."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    """Print to standard error, if that takes it."""
    with safe_streams():
        print(printable(text), end="", file=sys.stderr)


def _can_print() -> bool:
    """True if standard output is still open."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """Discard buffered output, which the interpreter would try to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"gruppo {__version__}")
        return 0
    for words, (module, function) in VERBS.items():
        if tuple(arguments[: len(words)]) == words:
            require_train(f"gruppo {' '.join(words)}", "pydantic", "rich")
            return getattr(importlib.import_module(module), function)(arguments[len(words) :])
    started = [words for words in VERBS if words[0] == arguments[0]]  # `gruppo data`, without what is done with it
    if started and arguments[1:] in (["-h"], ["--help"]):
        return run([*started[0], "--help"])
    known = [" ".join(words) for words in VERBS]
    near = [" ".join(words) for words in started] or difflib.get_close_matches(arguments[0], known, n=1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    _complain(f"gruppo: there is no verb {' '.join(arguments[:2])!r}; {hint} are: {', '.join(known)}\n")
    return 2
