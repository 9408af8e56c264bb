"""What an agent reads and writes as token ids. Expected ids are spelled out word by word."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from mapl_core.tokens import decode_response, encode_prompt, encode_response


def words_to_ids(tokenizer, words: str) -> list[int]:
    """Ids by looking each word up, without the tokenizer's own encoding."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[word] for word in words.split()]


def test_tok1_a_template_that_writes_bos_gets_no_second_one(tiny_llama):
    tokenizer = tiny_llama().tokenizer
    expected = words_to_ids(tokenizer, "<s> <|im_start|> user write a summary <|im_end|> <|im_start|> assistant")
    assert encode_prompt(tokenizer, "write a summary", "chat") == expected


def test_tok1_plain_text_has_one_bos_at_position_0_even_if_the_text_brings_its_own(tiny_llama):
    tokenizer = tiny_llama().tokenizer
    expected = words_to_ids(tokenizer, "<s> write a summary")
    assert encode_prompt(tokenizer, "write a summary", "text") == expected
    assert encode_prompt(tokenizer, "<s> write a summary", "text") == expected


def test_tok1_a_response_has_no_bos_and_exactly_one_eos(tiny_llama):
    tokenizer = tiny_llama().tokenizer
    expected = words_to_ids(tokenizer, "red cat </s>")
    assert encode_response(tokenizer, "red cat") == expected
    assert encode_response(tokenizer, "red cat </s>") == expected
    assert encode_response(tokenizer, "") == words_to_ids(tokenizer, "</s>")


@pytest.mark.parametrize("form", ["chat", "text"])
def test_tok2_a_tokenizer_without_bos_works_and_no_id_is_none(tiny_qwen3, form):
    tokenizer = tiny_qwen3().tokenizer
    assert tokenizer.bos_token_id is None
    template = {"chat": "<|im_start|> user {} <|im_end|> <|im_start|> assistant", "text": "{}"}[form]
    assert encode_prompt(tokenizer, "the cat sleeps", form) == words_to_ids(
        tokenizer, template.format("the cat sleeps")
    )
    assert encode_response(tokenizer, "the cat") == words_to_ids(tokenizer, "the cat <|im_end|>")


class MappingByDefault:
    """A tokenizer whose apply_chat_template returns a mapping unless told otherwise, as transformers 5 does."""

    chat_template = "any"
    bos_token_id = None
    eos_token_id = 9

    def apply_chat_template(self, conversation, *, add_generation_prompt=False, tokenize=True, return_dict=True):
        assert conversation == [{"role": "user", "content": "hello"}]
        ids = [5, 6, 7] + [8] * add_generation_prompt
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


def test_tok4_return_dict_is_explicit():
    assert encode_prompt(MappingByDefault(), "hello", "chat") == [5, 6, 7, 8]


def test_a_system_message_comes_first_and_only_in_a_chat(tiny_qwen3):
    tokenizer = tiny_qwen3().tokenizer
    chat = "<|im_start|> system write the title <|im_end|> <|im_start|> user the cat <|im_end|> <|im_start|> assistant"
    assert encode_prompt(tokenizer, "the cat", "chat", "write the title") == words_to_ids(tokenizer, chat)
    plain = encode_prompt(tokenizer, "the cat", "text", "write the title")
    assert plain == words_to_ids(tokenizer, "the cat")


def test_an_eos_that_the_tokenizer_appends_does_not_end_the_prompt(tiny_qwen3):
    tokenizer = tiny_qwen3().tokenizer
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    assert tokenizer.encode("the cat")[-1] == tokenizer.eos_token_id
    assert encode_prompt(tokenizer, "the cat", "text") == words_to_ids(tokenizer, "the cat")


def test_an_eos_that_the_text_itself_ends_with_stays(tiny_llama):
    tokenizer = tiny_llama().tokenizer
    assert encode_prompt(tokenizer, "the cat </s>", "text") == words_to_ids(tokenizer, "<s> the cat </s>")


def test_a_decoded_response_has_no_special_tokens_and_keeps_its_spaces(tiny_qwen3):
    tokenizer = tiny_qwen3().tokenizer
    tokenizer.clean_up_tokenization_spaces = True  # a checkpoint may ask for "cat, dog."
    assert decode_response(tokenizer, encode_response(tokenizer, "cat , dog .")) == "cat , dog ."
    assert decode_response(tokenizer, ()) == ""


def test_chat_form_without_a_template_is_an_error_with_the_remedy(tiny_gpt2):
    tokenizer = tiny_gpt2().tokenizer
    with pytest.raises(ValueError, match="chat template.*use form 'text'"):
        encode_prompt(tokenizer, "the cat", "chat")
    with pytest.raises(ValueError, match="got 'dialogue'"):
        encode_prompt(tokenizer, "the cat", "dialogue")
