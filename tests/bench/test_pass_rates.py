"""Tables of what passes, what does not and what was not run."""

from dynamo_backends.bench.cells import Cell, Outcome, Run
from dynamo_backends.bench.dot_plots import panels
from dynamo_backends.bench.markdown_tables import failures_table, left_list, rates_table, rates_text
from tests.bench.made_up import failing, run_of


def right(in_eager: int = 0) -> Outcome:
    return Outcome("pass", ops_on_backend=10, ops_fallback=in_eager, breaks=1)


def run() -> Run:
    return run_of(
        {
            ("first", "x"): right(in_eager=2),
            ("second", "x"): failing("fail_accuracy", "off by 3 | or\n<more>"),
            ("third", "x"): failing("eager_fail_to_run", "no weights"),
            ("fourth", "x"): failing("timeout", "y" * 300),
            ("first", "y"): Outcome("pass", breaks=0),
        },
        [Cell("second", "y"), Cell("third", "y")],
    )


def test_rates_count_all_failures_of_what_eager_can_run():
    head, _, *lines = rates_table(run()).splitlines()
    assert head == (
        "| backend | pass | pass rate | fail_accuracy | fail_to_run | not_compiled | timeout | OOM "
        "| eager fails | not run | operators in eager | graph breaks |"
    )
    assert lines == [
        "| `x` | 1/3 | 33.3% | 1 | 0 | 0 | 1 | 0 | 1 | 0 | 2 of 12 | 1 |",
        "| `y` | 1/1 | 100.0% | 0 | 0 | 0 | 0 | 0 | 0 | 2 | - | 0 |",
    ]


def test_modes_have_lines_of_their_own():
    both = Cell("first", "x"), Cell("first", "x", "training")
    lines = rates_table(Run({}, list(both), {both[0]: right()})).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| `x` (inference, float32)", "1/1"],
        ["| `x` (training, float32)", "0/0"],
    ]


def test_failures_have_reasons_in_one_line():
    lines = failures_table(run()).splitlines()[2:]
    assert lines[0] == r"| second | `x` | fail_accuracy | off by 3 \| or &lt;more> |"
    assert lines[1] == "| third | `x` | eager_fail_to_run | no weights |"
    assert lines[2] == f"| fourth | `x` | timeout | {'y' * 197}... |"
    assert failures_table(run_of({("a", "x"): right()})) == "No measured model fails.\n"


def test_what_was_not_run_is_named():
    found = run()
    found.cells += [Cell("first", "z"), Cell("second", "z")]
    lines = left_list(found).splitlines()
    assert lines == ["Not run:", "", "- `y`: 2 models: second, third", "- `z`: all 2 models"]
    assert left_list(run_of({("a", "x"): right()})) == "All models were measured.\n"


def test_the_text_has_all_three():
    found = run()
    for part in (rates_table, failures_table, left_list):
        assert part(found) in rates_text(found)


def test_a_run_without_times_has_no_plots():
    found = run_of({("a", "x"): right()})
    assert panels(found)
    found.context["accuracy"] = True
    assert panels(found) == []
