"""The reward of an answer on a long document: 1.0 if it is the reference answer, else 0.0.

    reward.custom_reward_function.path=recipes/rewards/long_context_qa.py

DocQA-RL-1.6K asks for answers that end in "Therefore, the answer is ..." or "The correct answer is (B)", and its
ground truths have the same form. The answer is the rest of the line behind the last "answer is" that follows the
reasoning; a response without those words, or whose reasoning isn't closed, is 0.0. What the ground truth is decides how
it is compared:

* a choice ("The correct answer is (B)", or a bare letter from A to D): the answer begins with the same letter, which is
  in parentheses or has `.`, `:`, `,`, `)` or nothing behind it.
* an integer: the same number. With a fraction: within 0.15 % of it, as DocMath's own evaluation has it. Thousands
  separators, currency signs and words around the number don't count; an answer in percent is also compared as a
  fraction of 100. An answer with several numbers is wrong.
* anything else: the same words, whatever their case, punctuation, spaces and articles (a, an, the).

DocQA's authors also accept a part of the reference answer and ask a model where this rule says no; here nothing is
asked and a part is not enough. A ground truth that isn't text is a ValueError.
"""

import re

TOLERANCE = 0.0015  # of the reference number
PHRASE = re.compile(r"\banswer is\b", re.IGNORECASE)
CHOICE_PHRASE = "correct answer is"
CHOICE = re.compile(r"\(([A-D])\)|([A-D])(?:[.:,)]|$)")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
PUNCTUATION = re.compile(r"(?<!\d)[^\w\s]|[^\w\s](?!\d)")  # not the point of 3.5
ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise ValueError(f"ground_truth: expected text, got {ground_truth!r}")
    reference = stated(ground_truth) or cleaned(ground_truth)
    answer = stated(behind_reasoning(solution_str))
    if CHOICE_PHRASE in ground_truth.lower() or reference in {"A", "B", "C", "D"}:
        return float(letter_of(answer) == letter_of(reference) != "")
    if NUMBER.fullmatch(reference):
        return float(same_number(answer, reference))
    return float(words_of(answer) == words_of(reference) != [])


def behind_reasoning(answer: str) -> str:
    if "<think>" in answer and "</think>" not in answer:
        return ""
    return answer.rpartition("</think>")[2]


def stated(text: str) -> str:
    """What stands behind the last "answer is"; nothing where nothing does."""
    phrases = list(PHRASE.finditer(text))
    return cleaned(text[phrases[-1].end() :]) if phrases else ""


def cleaned(text: str) -> str:
    """The first line that isn't empty, without emphasis, quotes and the full stop."""
    line = text.strip(" :\r\n\t").partition("\n")[0]
    return line.replace("*", "").strip(" \t\"'`").rstrip(".").strip(" \t\"'`")


def letter_of(answer: str) -> str:
    choice = CHOICE.match(answer)
    return (choice[1] or choice[2]) if choice else ""


def same_number(answer: str, reference: str) -> bool:
    found = NUMBER.findall(answer.replace("\N{MINUS SIGN}", "-"))
    if len(found) != 1:
        return False
    expected, value = value_of(reference), value_of(found[0])
    tolerance = TOLERANCE * abs(expected) if "." in reference else 0.0
    candidates = [value, value / 100] if "%" in answer else [value]
    return any(abs(each - expected) <= tolerance for each in candidates)


def value_of(number: str) -> float:
    return float(number.replace(",", ""))


def words_of(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    letters = PUNCTUATION.sub("", THOUSANDS.sub("", text.lower()))
    return ARTICLE.sub(" ", letters).split()
