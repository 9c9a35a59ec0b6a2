"""The prompts of the parity tests: short and long, several languages and scripts, code, emoji and odd spaces."""

# ruff: noqa: RUF001 (other scripts are the point)

from __future__ import annotations

SHORT = [
    "Hi",
    "The",
    "1",
    "Once upon a time",
    "Water boils at",
    "My favourite season is",
    "To be honest, I never",
    "Q: What is 2+2? A:",
    "The capital of Portugal is",
    "In the year 1969,",
    "She opened the door and",
    "A triangle has three",
    "Dear Sir or Madam,",
    "Roses are red,",
    "Monday, Tuesday,",
    "The opposite of cold is",
    "Yes.",
    "... and then?",
]

LANGUAGES = [
    "Der Hund lief über die Straße und",
    "Je voudrais une tasse de café, s'il vous",
    "El gato duerme en la silla porque",
    "La pioggia cade piano sul tetto e",
    "O rio corre devagar até o",
    "Kissa istuu ikkunalla ja",
    "Kedi bahçede uyuyor çünkü",
    "Кошка сидит на окне и",
    "Η γάτα κοιμάται πάνω στο",
    "猫は窓のそばで眠って",
    "今天天气很好,我们一起去",
    "고양이가 창문 옆에서",
    "القطة تنام على",
    "बिल्ली खिड़की पर",
    "Con mèo ngủ bên",
    "החתול ישן על",
]

CODE = [
    "def add(a, b):\n    return",
    "def is_even(n: int) -> bool:\n    ",
    "for (int i = 0; i < 10; i++) {\n    printf(",
    "SELECT name, age FROM people WHERE",
    "import numpy as np\n\nx = np.zeros((3, 3))\nprint(",
    '{"name": "Ada", "age": 36, "languages": [',
    "fn main() {\n    let mut total = 0;\n    for i in 0..10 {",
    "<html>\n  <head>\n    <title>",
    "git commit -m 'Fix the",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "const double = (x) =>",
    "# Install\n\n```bash\npip install",
]

ODD = [
    "\U0001f642\U0001f980\U0001f642\U0001f980\U0001f642",
    "I love pizza \U0001f355 and",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 went to the \U0001f3d6\ufe0f",
    "3.14159 26535 89793",
    "2, 4, 8, 16, 32,",
    "AAAAAAAAAAAAAAAAAAAAAAAA",
    "a b c d e f g h i j k",
    "   leading spaces and\ttabs\t",
    "\n\n\nThree empty lines above.",
    "!!! ??? ;;; ---",
    "x = (((((((((1 + 2) * 3)",
    "naïve café ½ ± × ÷ ≠ ∞",
]

_STORY = (
    "The lighthouse keeper wrote a line in the log each evening: the wind, the height of the waves, and the ships that "
    "had gone by. On the third of March there was no wind at all, and a small boat without sails came out of the fog. "
)
_RULES = "Rule {}: every visitor signs the book, closes the gate behind them, and leaves the lamp burning.\n"

LONG = [
    _STORY * 2 + "Nobody was",
    _STORY + "He put down his pen and",
    "".join(_RULES.format(number) for number in range(1, 9)) + "Rule 9:",
    "List the primes below one hundred: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67,",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nName three fruits and say what "
    "colour each of them is.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n" * 3
    + "def ",
    "Die Sonne ging auf, und das Dorf erwachte. Die Bäckerin öffnete ihren Laden, der Schmied schürte das Feuer, und "
    "die Kinder liefen zur Schule. Nur der alte Müller blieb im Bett, denn",
]

PROMPTS = [*SHORT, *LANGUAGES, *CODE, *ODD, *LONG]
