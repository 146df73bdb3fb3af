from dali_gguf.offload.pays import PERIOD, TRIAL, Pays


def run(pays, steps, us, tokens=1):
    """us(pays) is the time of a step, given what is enabled."""
    for _ in range(steps):
        pays.record(us(pays), tokens)


def test_what_helps_is_kept_and_what_hurts_is_not():
    pays = Pays(("good", "bad"))
    run(pays, 2 * PERIOD + 1, lambda p: 100 - 5 * p.enabled("good") + 5 * p.enabled("bad"))
    assert pays.on == {"good": True, "bad": False}
    assert pays.trials == {"good": 1, "bad": 1}
    assert pays.line() == "kept good; off bad"


def test_no_difference_is_not_worth_keeping():
    pays = Pays(("same",))
    run(pays, TRIAL + 1, lambda p: 100)
    assert pays.on == {"same": False}


def test_a_later_trial_can_bring_it_back():
    pays = Pays(("f",))
    run(pays, PERIOD + 1, lambda p: 100 + p.enabled("f"))
    assert not pays.on["f"] and not pays.enabled("other")
    run(pays, PERIOD, lambda p: 100 - 3 * p.enabled("f"))
    assert pays.on["f"] and pays.trials["f"] == 2


def test_one_slow_step_decides_nothing():
    pays = Pays(("f",))
    times = iter([100] * 6 + [9000] + [100] * 100)
    run(pays, TRIAL + 1, lambda p: next(times) - 4 * p.enabled("f"))
    assert pays.on["f"]


def test_another_number_of_tokens_starts_the_trial_anew():
    pays = Pays(("f",))
    run(pays, TRIAL - 2, lambda p: 100 + 9 * p.enabled("f"))
    run(pays, TRIAL - 2, lambda p: 50, tokens=2)
    assert pays.trials["f"] == 0 and pays.line() == ""


def test_nothing_to_switch():
    pays = Pays(())
    run(pays, 300, lambda p: 1)
    assert not pays.enabled("f") and pays.line() == ""
