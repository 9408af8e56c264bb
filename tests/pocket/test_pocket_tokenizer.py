"""The word tokenizer of the pocket models: one token per word, nothing unknown, text and ids map back and forth."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from mapl_core.domains import get_domain
from mapl_core.pocket import tldr
from mapl_core.pocket.common import END, PAD, START, TAGS, build_tokenizer, domain_tokenizer, prompt_forms
from mapl_core.tokens import decode_response, encode_prompt, encode_response


@pytest.fixture(scope="module")
def tokenizer():
    return domain_tokenizer("tldr")


@pytest.fixture(scope="module")
def answers() -> list[str]:
    rng = random.Random(0)
    return [tldr.sample_answer(agent, tldr.draw_slots(rng), rng) for agent in (0, 1) for _ in range(300)]


def test_vocabulary_is_at_most_400_and_special_tokens_are_distinct(tokenizer):
    assert len(tokenizer) <= 400
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (PAD, END, None)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


@pytest.mark.parametrize("source", ["phrases", "tags", "fields", "subreddits"])
def test_phrases_and_marks_are_one_token_each(tokenizer, source):
    atoms = {
        "phrases": [phrase for pair in tldr.TRANSITIONS.values() for phrase in pair],
        "tags": TAGS,
        "fields": tldr.FIELD_NAMES,
        "subreddits": tldr.SUBREDDITS,
    }[source]
    for atom in atoms:
        ids = tokenizer.encode(f"sister {atom} car")
        assert len(ids) == 3 and tokenizer.unk_token_id not in ids, atom


def test_a_phrase_is_found_between_word_boundaries_only():
    tokenizer = build_tokenizer(["in factory begin fact"], ["in fact"])
    pieces = tokenizer.tokenize("in factory begin fact in fact.")
    assert pieces == ["in", "factory", "begin", "fact", "in fact", "."]


def test_decoded_answers_read_like_text_and_encode_to_the_same_ids(tokenizer, answers):
    for text in answers:
        ids = encode_response(tokenizer, text)
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in ids
        assert decode_response(tokenizer, ids) == text
        assert len(ids) - 1 == tldr.count_tokens(text)


def test_any_sampled_ids_survive_decoding_and_encoding(tokenizer):
    """Not only well-formed answers: an untrained policy may put any ordinary token anywhere."""
    rng = random.Random(0)
    ordinary = [index for index in range(len(tokenizer)) if index not in tokenizer.all_special_ids]
    for _ in range(300):
        ids = rng.choices(ordinary, k=30)
        assert tokenizer.encode(decode_response(tokenizer, ids), add_special_tokens=False) == ids


def test_a_coordinators_text_keeps_its_tags_and_splits_into_the_agents_parts(tokenizer):
    domain, task = get_domain("tldr"), tldr.make_tasks("eval", 1)[0]
    parts = tldr.best_answers(task)
    text = decode_response(tokenizer, encode_response(tokenizer, domain.join(parts)))
    assert domain.split_joint(text) == list(parts)


def test_a_coordinators_limit_holds_the_longest_scripted_parts_with_their_tags_and_the_end(tokenizer):
    domain, rng = get_domain("tldr"), random.Random(1)
    drawn = [[tldr.sample_answer(agent, tldr.draw_slots(rng), rng) for _ in range(1000)] for agent in (0, 1)]
    longest = [max(texts, key=tldr.count_tokens) for texts in drawn]
    assert len(encode_response(tokenizer, domain.join(longest))) <= sum(tldr.NEW_TOKENS)


@pytest.mark.parametrize("form", ["chat", "text"])
def test_no_prompt_form_has_an_unknown_token(tokenizer, form):
    domain, rng = get_domain("tldr"), random.Random(0)
    for task in tldr.make_tasks("eval", 40):
        drafts = [tldr.sample_answer(agent, tldr.draw_slots(rng), rng) for agent in (0, 1)]
        prompts = prompt_forms(domain, task, drafts)
        assert len(prompts) == 8
        for name, write in prompts.items():
            assert tokenizer.unk_token_id not in encode_prompt(tokenizer, write(), form), (name, write())


def test_tok2_the_chat_template_opens_the_answer_and_adds_no_beginning_token(tokenizer):
    ids = encode_prompt(tokenizer, "write a short summary .", "chat")
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces == [START, "user", "write", "a", "short", "summary", ".", END, START, "assistant"]


def test_saving_and_loading_keeps_the_tokenizer(tokenizer, answers, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.pad_token, loaded.eos_token, loaded.bos_token) == (PAD, END, None)
    for text in answers[::50]:
        assert encode_prompt(loaded, text, "chat") == encode_prompt(tokenizer, text, "chat")
        assert decode_response(loaded, encode_response(loaded, text)) == text
