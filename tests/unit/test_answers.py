"""Answers as judges write them: every spelling has one right value, or is refused."""

from __future__ import annotations

import math

import pytest

from diffrl_zoo.vlm.parse import mean_after, points, read_columns, rewritten, rubric_score, winner
from diffrl_zoo.vlm.question import Reply, Unreadable

# From 1 to 5.
READ = {
    "Score: 4": 4.0,
    "score:4": 4.0,
    "SCORE = 4.5": 4.5,
    "Score：4": 4.0,
    "Score： ４": 4.0,
    "**Score: 4**": 4.0,
    "**Score:** 4": 4.0,
    "Score: **4**/5": 4.0,
    "Score: 4/5": 4.0,
    "Score: 4 / 5.": 4.0,
    "Score: 4 out of 5": 4.0,
    "Score: 4 out of a possible 5": 4.0,
    "Score: 4 of 5": 4.0,
    "Score: 4 (out of 5)": 4.0,
    "Score: four out of five": 4.0,
    "Score: four": 4.0,
    "Score: four and a half": 4.5,
    "Score: 4½": 4.5,
    "Score: 4 1/2": 4.5,
    "Score: 4,5": 4.5,
    "Score: 4.50": 4.5,
    "Score: 4 points": 4.0,
    "Score: 4 stars": 4.0,
    "Score: 4pts": 4.0,
    "4 stars": 4.0,
    "★★★★☆": 4.0,
    "Score: ★★★★☆": 4.0,
    "```\nScore: 4\n```": 4.0,
    '```json\n{"score": 4}\n```': 4.0,
    '{"score": 4}': 4.0,
    '{"score": [4]}': 4.0,
    '{"score": "4/5"}': 4.0,
    'Here it is: {"reason": "2 cats", "score": 4.0} Done.': 4.0,
    "{'score': 4}": 4.0,
    '[{"score": 4}]': 4.0,
    '{"result": {"score": 4}}': 4.0,
    '{"score": 4, "reason": "fine",}': 4.0,
    "Score: [4]": 4.0,
    "Score: (4)": 4.0,
    'Score: "4"': 4.0,
    "<score>4</score>": 4.0,
    "<answer>4</answer>": 4.0,
    "\\boxed{4}": 4.0,
    "$\\boxed{4}$": 4.0,
    "Final Score: 4": 4.0,
    "Score (1-5): 4": 4.0,
    "Score on a scale of 1 to 5: 4": 4.0,
    "On a scale of 1 to 5, I would give it a 4.": 4.0,
    "I would give it a Score: 4": 4.0,
    "I'd rate this image 4 out of 5.": 4.0,
    "I'd rate this image 4/5 because it has 2 cats": 4.0,
    "Score: 4\nThanks!": 4.0,
    "Score: 4 because the colours are right": 4.0,
    "Score: 4 - good": 4.0,
    "Score - 4": 4.0,
    "Score is 4": 4.0,
    "My score is 4.": 4.0,
    "The final score is 4.": 4.0,
    "Rating: 4": 4.0,
    "Overall: 4": 4.0,
    "评分：4分": 4.0,
    "得分：４分": 4.0,
    "满分5分，得分4分": 4.0,
    "Note : 4 sur 5": 4.0,
    "Bewertung: 4,5 von 5": 4.5,
    "4": 4.0,
    "4.": 4.0,
    "4/5": 4.0,
    "４": 4.0,
    "4 - Good match": 4.0,
    "4 (good)": 4.0,
    "It shows 2 cats and 3 dogs.\n4": 4.0,
    "### Score\n4": 4.0,
    "| Score | 4 |": 4.0,
    "- Score: 4": 4.0,
    "Score: ~4": 4.0,
    "Score: about 4": 4.0,
    "Score: +4": 4.0,
    "Alignment score: 3\nQuality score: 5\nOverall score: 4": 4.0,
    "<think>Score: 2? no</think>Score: 4": 4.0,
    "Score: ٤": 4.0,
    "Score: 4\u200b": 4.0,
    "Score: 4e0": 4.0,
    "Score → 4": 4.0,
    "Score of 4": 4.0,
    "Score: 4, Confidence: 90%": 4.0,
    "Score: 4. The 2 cats are right.": 4.0,
    "Score: 4\nScore: 4/5": 4.0,
    "The score: **4 out of 5** stars": 4.0,
    "4 out of 5 stars": 4.0,
    "Score: 4;": 4.0,
    "Score:4,0": 4.0,
    "Score: 4:": 4.0,
    "Score: ④": 4.0,
    "Score : <4>": 4.0,
    "Score/5: 4": 4.0,
    "<b>Score:</b> 4": 4.0,
    "4 分(满分 5 分)": 4.0,
    "5点満点中4点": 4.0,
    "答案：4": 4.0,
    "Score: 4 (four)": 4.0,
    "Score: 4 / 5 = 0.8": 4.0,
    "I'd say 4": 4.0,
    "[4]": 4.0,
    '{"final_score": 4, "alignment_score": 3}': 4.0,
    '{"score": {"value": 4}}': 4.0,
    '{"Score": 4, "Max": 5}': 4.0,
    "The score is 4 since 3 of 4 objects are there": 4.0,
    "Score: 4 🙂": 4.0,
    "Score 4️⃣": 4.0,
    "⭐️⭐️⭐️⭐️": 4.0,
    "\\[\\boxed{\\text{Score: }4}\\]": 4.0,
    "Score: 4<|im_end|>": 4.0,
    '{"rating": 4, "explanation": "The score: 3 cats"}': 4.0,
    "Score: a solid 4": 4.0,
    "It's a 4.": 4.0,
    "On a scale from 1-5: 4": 4.0,
    "Score: 4 on a 5-point scale": 4.0,
    "总分：4": 4.0,
    "我给这张图片打4分": 4.0,
    "Оценка: 4 из 5": 4.0,
    "4 étoiles sur 5": 4.0,
    "Puntuación: 4 estrellas de 5": 4.0,
    "Score : <4/5>": 4.0,
    "Pontuação: 4": 4.0,
    "Poäng: 4": 4.0,
    "النتيجة: ٤": 4.0,
    "Score: 4 (not 3)": 4.0,
    # Thoughts, as templates leave them.
    "Score: 2 maybe\n</think>\nScore: 4": 4.0,
    "<thought>Score: 3</thought>Score: 4": 4.0,
    "◁think▷Score: 3◁/think▷Score: 4": 4.0,
    "[THINK]Score: 3[/THINK]Score: 4": 4.0,
    "<|channel|>analysis<|message|>Score: 3<|end|><|channel|>final<|message|>Score: 4": 4.0,
    "Score: 4. Actually, the 2 cats are right. Score: 4": 4.0,
    "Alignment: 2. Wait, there are 3 cats. Final score: 4": 4.0,
}
OTHER_SCALES = [
    ("80%", 0, 1, 0.8),
    ("Score: 80 %", 0, 100, 80),
    ("Score: 80%", 0, 10, 8),
    ("Score: 4/5", 0, 1, 0.8),
    ("Score: -1", -5, 5, -1),
    ("Score: minus 2", -5, 5, -2),
    ("Score: −2,5", -5, 5, -2.5),
    ("Score: .8", 0, 1, 0.8),
    ("Score: ½", 0, 1, 0.5),
    ("Score: 1,000", 10, 1000, 1000),
    ("Score: 7 of 10", 0, 10, 7),
    ("Score: seven", 0, 10, 7),
    ("Score: 0.85/1.0", 0, 1, 0.85),
    ("85 out of 100", 0, 100, 85),
]
REFUSED = [
    "Score: <4",
    "Score: < 4",
    "Score: 3-4",
    "Score: 3–4",
    "Score: 3 to 4",
    "Score: 3 or 4",
    "Score: between 3 and 4",
    "Score: 3, 4",
    "Score: 3 4",
    "Score: 3~4",
    "Score: 3/10",
    "Score: 8/10",
    "Score: 80%",
    "Score: 6",
    "Score: 0",
    "Score: -4",
    "Score: −4",
    "Score: > 4",
    "Score: at least 4",
    "Score: 4+",
    "Score: 4.5.1",
    "Score: 4th",
    "Score: nan",
    "Score: inf",
    "",
    "I cannot help with that.",
    "I cannot judge the 2 people in this image.",
    "Score: X",
    "Score: 3\nScore: 4",
    '{"score": [3, 4]}',
    '{"score": null}',
    '{"score": true}',
    "Score: 3 ± 1",
    "Alignment score: 3\nQuality score: 5",
    "Score: N/A",
    "3-4",
    "Score: 1-5",
    "Score: [3, 4]",
    "Score: 3 / 4",
    '{"score": "3-4"}',
    "Score: 3 and 4",
    "Score: 3..4",
    "There are 4 apples.",
    "Score: not 4",
    "1. The image is good.",
    "Sorry, I can't rate images of 2 people.",
    "I refuse to give 5 points to this",
    "Score: unable to rate, 2 people",
    "[3,4]",
    "The prompt asks for 3 stars and the image has 3 stars.",
    "4 out of 5 apples are shown",
    "There is a total of 3 cats.",
    "The result is 2 dogs",
    "Score: 4 or even 5",
    "Score: 4 out of 10",
    "Score: no 4",
    "Score: 4 → 5",
    "Score: 4 -> 3",
    "Score: 3 + 1",
    "Score: 2 + 2 = 4",
    "Score: 4 x 5",
    "Score: 4·5",
    "Score: 3\nWait, no. Score: 4",
    "Score: 3. Actually, 4.",
    "It's a 4 legged dog.",
    "<think>Score: 3",
    "Score: IV",
]


@pytest.mark.parametrize(("text", "low", "high", "value"), [*((t, 1, 5, v) for t, v in READ.items()), *OTHER_SCALES])
def test_a_number_is_read_however_it_is_written(text: str, low: float, high: float, value: float) -> None:
    assert rubric_score(Reply(text), low, high) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("text", REFUSED)
def test_what_could_mean_another_number_is_refused_with_the_answer(text: str) -> None:
    with pytest.raises(Unreadable) as caught:
        rubric_score(Reply(text), 1, 5)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("Score: 1,000", 0, 1000), ("Score: 7/5", 0, 10), ("Score: 11", 0, 10)]
)
def test_other_scales_refuse_too(text: str, low: float, high: float) -> None:
    with pytest.raises(Unreadable):
        rubric_score(Reply(text), low, high)


@pytest.mark.parametrize(
    "text",
    [
        "content: 4\ntext: n/a\ntwo words: 2.5",
        "two words: 2,5/5\n**Text:** N/A\nContent： ４ points\nThat is all.",
        '```json\n{"content": 4, "text": null, "two_words": "2.5"}\n```',
        "1. Content (1-5): 4 - all there\n2. Text: not applicable\n3. Two words = 2.5 out of 5",
        "| content | 4 |\n| text | n/a |\n| two words | 2.5 |",
    ],
)
def test_columns_are_read_by_their_names(text: str) -> None:
    content, words, two = read_columns(Reply(text), ("content", "text", "two words"), 1, 5)
    assert (content, two) == (4.0, 2.5) and math.isnan(words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Winner: A", 1.0), ("**Winner:** Image B", 0.0), ("Winner：Ａ", 1.0), ('{"winner": "B"}', 0.0), ("A", 1.0),
        ("The winner is image A.", 1.0), ("It is a tie.\nWinner: tie", 0.5), ("winner: the first image", 1.0),
        ("The answer is a tie", 0.5), ("Winner: A or B", None), ("Winner: A\nWinner: B", None), ("", None),
        ("Which is better is a matter of taste", None), ("Winner: C", None),
    ],
)  # fmt: skip
def test_winners(text: str, value: float | None) -> None:
    if value is not None:
        assert winner(Reply(text)) == value
        return
    with pytest.raises(Unreadable):
        winner(Reply(text))


@pytest.mark.parametrize(
    "text",
    [
        "<score>[1, 0]</score>",
        "```json\n[1, 0]\n```",
        "<score>１，０</score>",
        '{"score": ["1", 0]}',
        "<score>[true, false]</score>",
    ],
)
def test_points(text: str) -> None:
    assert points(Reply(text), 2) == [1.0, 0.0]


def test_numbers_after_a_text_and_prompts() -> None:
    assert mean_after(Reply("**Final Score:** 4 out of 5"), ["Final Score:"], 1, 5) == 4.0
    assert mean_after(Reply("Final Score： ４"), ["Final Score:"], 1, 5) == 4.0
    for text in ("Final Score: 3-4", "Final Score: 3\nFinal Score: 4", "Final Score: none"):
        with pytest.raises(Unreadable):
            mean_after(Reply(text), ["Final Score:"], 1, 5)
    assert rewritten(Reply("New prompt： “a red cat”")) == "a red cat"
