from kvpp_connect.demo.workload import make_waves


def test_there_are_a_dozen_prompts_of_many_lengths_up_to_1500():
    lengths = [len(prompt) for wave in make_waves() for prompt in wave.prompts]
    assert len(lengths) == 12
    assert len(set(lengths)) >= 8
    assert max(lengths) == 1500
    assert min(lengths) < 16


def test_the_second_wave_repeats_and_extends_prompts_of_the_first():
    first, second = make_waves()
    assert sum(prompt in first.prompts for prompt in second.prompts) == 2
    for prompt in second.prompts:
        assert any(prompt.startswith(earlier) for earlier in first.prompts)


def test_the_prompts_are_the_same_every_time():
    assert make_waves() == make_waves()
    assert make_waves(seed=1) != make_waves()


def test_prompts_have_no_lower_case_letters_which_the_tokenizer_would_merge():
    for wave in make_waves():
        assert all(prompt == prompt.upper() for prompt in wave.prompts)
