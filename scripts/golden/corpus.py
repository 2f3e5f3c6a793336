"""Training text of the small tokenizers, and the 5,000 test strings. Everything follows from fixed seeds."""

import random
import sys
import unicodedata

from goldenio import GOLDEN

# Python 3.11 knows Unicode 14. Code points assigned later have different properties in different libraries, so test
# strings hold none of them, whatever Python runs this.
UNICODE = unicodedata if sys.version_info[:2] == (3, 11) else None

SENTENCES = [
    # English, with contractions and punctuation
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "I'm sure they're fine; we've seen it, you'll see, he'd say so. It's what she'll do.",
    "DON'T SHOUT! I'LL DO IT, WE'VE BEEN THERE, YOU'RE LATE, I'M HERE, HE'D GO, IT'S OK.",
    "He said: \u201cthat\u2019s it\u201d \u2014 and left\u2026",
    "Rock 'n' roll in the '90s wasn't o'clock; the dogs' tails, y'all'd've known.",
    # other Latin
    "Der Stra\u00dfenbahnf\u00fchrer \u00e4rgert sich \u00fcber die gr\u00f6\u00dfte Verz\u00f6gerung.",
    "L\u2019\u00e9t\u00e9 dernier, j\u2019ai mang\u00e9 une cr\u00eape \u00e0 No\u00ebl, \u00e7a m\u2019\u00e9tait \u00e9gal.",
    "\u00bfD\u00f3nde est\u00e1 el ni\u00f1o? \u00a1Ma\u00f1ana ser\u00e1 otro d\u00eda!",
    "Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144, pchn\u0105\u0107 w t\u0119 \u0142\u00f3d\u017a je\u017ca.",
    "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148 \u00fap\u011bl \u010f\u00e1belsk\u00e9 \u00f3dy.",
    "T\u00f4i mu\u1ed1n u\u1ed1ng m\u1ed9t c\u1ed1c c\u00e0 ph\u00ea s\u1eefa \u0111\u00e1, c\u1ea3m \u01a1n b\u1ea1n.",
    "\u0130stanbul\u2019da \u0131\u015f\u0131k s\u00f6nd\u00fc, \u011f\u00f6lge b\u00fcy\u00fcd\u00fc.",
    "Sm\u00f8rebr\u00f8d p\u00e5 \u00f8en med \u00e6bler; \u00de\u00f3r og \u00d0ur\u00edn.",
    # Cyrillic, Greek, Georgian, Armenian
    "\u0421\u044a\u0435\u0448\u044c \u0436\u0435 \u0435\u0449\u0451 \u044d\u0442\u0438\u0445 \u043c\u044f\u0433\u043a\u0438\u0445 \u0444\u0440\u0430\u043d\u0446\u0443\u0437\u0441\u043a\u0438\u0445 \u0431\u0443\u043b\u043e\u043a, \u0434\u0430 \u0432\u044b\u043f\u0435\u0439 \u0447\u0430\u044e.",
    "\u0407\u0445\u043d\u044f \u0433\u0456\u0434\u043d\u0456\u0441\u0442\u044c \u0456 \u0491\u0430\u043d\u043e\u043a, \u043c\u043e\u0454 \u0441\u043e\u043d\u0446\u0435!",
    "\u039e\u03b5\u03c3\u03ba\u03b5\u03c0\u03ac\u03b6\u03c9 \u03c4\u03b7\u03bd \u03c8\u03c5\u03c7\u03bf\u03c6\u03b8\u03cc\u03c1\u03b1 \u03b2\u03b4\u03b5\u03bb\u03c5\u03b3\u03bc\u03af\u03b1, \u1f10\u03bd \u1f00\u03c1\u03c7\u1fc7.",
    "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0 \u10db\u10e1\u10dd\u10e4\u10da\u10d8\u10dd, \u10e0\u10dd\u10d2\u10dd\u10e0 \u10ee\u10d0\u10e0?",
    "\u0532\u0561\u0580\u0587 \u0561\u0577\u056d\u0561\u0580\u0570, \u056b\u0576\u0579\u057a\u0565\u057d \u0565\u057d\u0589",
    # right to left, with vowel marks
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641 \u062d\u0627\u0644\u0643 \u0627\u0644\u064a\u0648\u0645\u061f",
    "\u0628\u0650\u0633\u0652\u0645\u0650 \u0671\u0644\u0644\u0651\u064e\u0647\u0650 \u0671\u0644\u0631\u0651\u064e\u062d\u0652\u0645\u064e\u0670\u0646\u0650",
    "\u0633\u0644\u0627\u0645 \u062f\u0646\u06cc\u0627\u060c \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u06f1\u06f2\u06f3 \u06a9\u062a\u0627\u0628",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd, \u05de\u05d4 \u05e9\u05dc\u05d5\u05de\u05da?",
    # Indic and South-East Asian
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e, \u0906\u092a \u0915\u0948\u0938\u0947 \u0939\u0948\u0902\u0964 \u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f \u0967\u0968\u0969",
    "\u09ac\u09be\u0982\u09b2\u09be \u09ad\u09be\u09b7\u09be \u0996\u09c1\u09ac \u09b8\u09c1\u09a8\u09cd\u09a6\u09b0\u0964",
    "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd \u0bae\u0bca\u0bb4\u0bbf \u0bae\u0bbf\u0b95\u0bb5\u0bc1\u0bae\u0bcd \u0baa\u0bb4\u0bae\u0bc8\u0baf\u0bbe\u0ba9\u0ba4\u0bc1.",
    "\u0c24\u0c46\u0c32\u0c41\u0c17\u0c41 \u0c2d\u0c3e\u0c37 \u0c1a\u0c3e\u0c32\u0c3e \u0c2e\u0c27\u0c41\u0c30\u0c02",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e27\u0e31\u0e19\u0e19\u0e35\u0e49\u0e2d\u0e32\u0e01\u0e32\u0e28\u0e14\u0e35\u0e21\u0e32\u0e01 \u0e51\u0e52\u0e53",
    "\u0eaa\u0eb0\u0e9a\u0eb2\u0e8d\u0e94\u0eb5 \u0e8a\u0eb2\u0ea7\u0ec2\u0ea5\u0e81",
    "\u1019\u1004\u103a\u1039\u1002\u101c\u102c\u1015\u102b \u1000\u1019\u1039\u1018\u102c",
    "\u179f\u17bd\u179f\u17d2\u178f\u17b8\u200b\u1796\u17b7\u1797\u1796\u179b\u17c4\u1780",
    "\u0f56\u0f40\u0fb2\u0f0b\u0f64\u0f72\u0f66\u0f0b\u0f56\u0f51\u0f7a\u0f0b\u0f63\u0f7a\u0f42\u0f66\u0f0d",
    # CJK
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u5427\u3002",
    "\u7e41\u9ad4\u4e2d\u6587\u8207\u7b80\u4f53\u4e2d\u6587\u7684\u5dee\u7570\u3001\u300c\u5f15\u865f\u300d\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3002\u4eca\u65e5\u306f\u3044\u3044\u5929\u6c17\u3067\u3059\u306d\u3002\u30ab\u30bf\u30ab\u30ca\u3082\u30fc\u66f8\u304f\u3002",
    "\uff8a\uff9d\uff76\uff78\uff76\uff85 \uff21\uff22\uff23\uff11\uff12\uff13\u3000\u5168\u89d2",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4! \uc624\ub298\uc740 \ub0a0\uc528\uac00 \uc88b\ub124\uc694.",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \u314b\u314b\u314b \u3160\u3160",
    "\U00020000\U00020bb7\u91ce\u5bb6 \U0002a6d6",
    # Africa, America, others
    "\u12a0\u121b\u122d\u129b \u1230\u120b\u121d \u1208\u12d3\u1208\u121d\u1362",
    "\u13e3\u13b3\u13a9 \u13a6\u13ec\u13c2\u13af\u13cd\u13d7",
    "\u1826\u182f\u180e\u1820 \u182e\u1823\u1829\u182d\u1823\u182f",
    # emoji
    "\U0001f600\U0001f602\U0001f923 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5",
    "\u2764\ufe0f\u200d\U0001f525 \U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f 1\ufe0f\u20e3 \u2620\ufe0e \U0001f9d1\U0001f3ff\u200d\U0001f680",
    # mathematics and symbols
    "\u2200x\u2208\u211d: \u2308x\u2309 = \u2212\u230a\u2212x\u230b, \u03b1 \u2227 \u00ac\u03b2, \u222b\u2080\u00b9 x\u00b2 dx = \u2153 \u2248 0.\u0305333",
    "\U0001d4d7\U0001d4ee\U0001d4f5\U0001d4f5\U0001d4f8 \U0001d7d8\U0001d7d9\U0001d7da \u2460\u2461\u2462 \u2160\u2161\u2162 \u00bd\u00be \u0661\u0662\u0663",
    "\u00a9 2024 \u2014 \u20ac1,234.56 / \u00a35 \u00b1 3 % \u2022 \u2192 \u2190 \u2713 \u2717 \u2591\u2592\u2593",
]

CODE = [
    "static int cmp(const void *a, const void *b)\n{\n\treturn *(const int *)a - *(const int *)b;\n}\n",
    "for (size_t i = 0; i < n; ++i) {\n    sum += x[i] * y[i];\n}\n",
    "#include <stdio.h>\n\nint main(void)\n{\n    printf(\"%d\\n\", 0x7fffffff);\n    return 0;\n}\n",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint([fib(i) for i in range(10)])\n",
    "class Foo(Bar):\n    def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n        self.x_1 = {'a': 1, \"b\": [2.5e-3, None]}\n",
    "SELECT u.id, COUNT(*) AS n FROM users u LEFT JOIN orders o ON o.user_id = u.id WHERE u.age >= 18 GROUP BY u.id;\n",
    "{\"name\": \"value\", \"list\": [1, 2.0, -3e10, true, null], \"nested\": {\"a\\u00e9\": \"\\n\"}}\n",
    "<div class=\"a b\"><p>Text &amp; more</p><!-- note --></div>\r\n<br/>\r\n",
    "fn main() { let v: Vec<u8> = vec![0u8; 16]; println!(\"{:?}\", &v[..4]); }\n",
    "const f = async (x) => { await g(`${x}`); return x?.y ?? 'z'; };\n",
    "if [ -z \"$1\" ]; then echo \"usage: $0 FILE\" >&2; exit 1; fi\n",
    "a := map[string]int{\"x\": 1}\nfor k, v := range a {\n\tfmt.Printf(\"%s=%d\\n\", k, v)\n}\n",
    "\\begin{equation}\n  E = mc^2 \\label{eq:1}\n\\end{equation}\n% comment\n",
    "https://example.org/path/to?q=a+b&c=%20d#frag user@example.com 192.168.0.1:8080 /usr/lib/x86_64-linux-gnu\n",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n\n```c\nint x;\n```\n- [ ] item\n",
    "CamelCaseName snake_case_name kebab-case-name SCREAMING_SNAKE x1y2z3 __dunder__ $var @attr #tag\n",
]

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<|begin_of_text|>", "<|end_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<repo_name>", "<file_sep>", "<think>", "</think>",
    "<|object_ref_start|>", "<|fim_prefix|>", "<tool_call>", "</tool_call>", "<|reserved_special_token_7|>", "[INST]", "[/INST]",
    "<0x41>", "<0xE2>", "<pad>", "<mark>", "<left>", "<word>", "<norm>",
]  # fmt: skip

# What sits around special tokens and between words in tests.
SPACES = [
    " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", "\t\t", "\r\n", "\r", "\u00a0", "\u3000", "\u2003", "\u2028", "\u0085",
    "\u200b", "\u180e", "\ufeff", "\x0b", "\x0c", "\x1c", "\x1f", " \t ", "\n\t", " \r\n ", "\u202f", "\u205f", "\u1680", "\u2029",
]  # fmt: skip

CONTRACTIONS = ["s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "VE", "M", "LL", "D", "Re", "vE", "Ll", "\u017f", "x", "", "rE", "lL", "dd", "st"]

ODD = [
    "", "\0", "a\0b", "\0\0\0", "\ufeff", "\ufeffabc", "abc\ufeff", "\ufffd", "\uffff", "\U0010ffff", "\ue000", "\x7f", "\x1b[31mred\x1b[0m",
    "\u2581", "\u2581\u2581", "a\u2581b", " \u2581 ", "\u0120", "\u010a", "\u0120hello\u010a", "Ġ", "e\u0301", "\u00e9", "e\u0301\u0323", "e\u0323\u0301",
    "\u1e69", "s\u0323\u0307", "s\u0307\u0323", "\u212b", "\u00c5", "A\u030a", "\uac00", "\u1100\u1161", "\u1100\u1161\u11a8", "\uac01", "\uf900", "\u0958",
    "\u2126", "\ufb01", "\u0344", "\u0f73", "\U0001d15e", "\U0001d1bc", "\u0301", " \u0301", "a" + "\u0301" * 40, "\u0300\u0301\u0302", "q\u0307\u0323",
    "\u200d", "\u200c", "\u200e\u200f", "\u202e reversed \u202c", "\u00ad", "\u0345", "\u1fb3", "\u1e9b\u0323", "\u3099", "\u304b\u3099", "\u304c",
    "\U0001f1e6", "\U0001f1e6\U0001f1e7\U0001f1e8", "\U0001f3fb", "\U000e0001", "\u20e3", "\ufe0f",
]  # fmt: skip


def english():
    return (GOLDEN / "english.txt").read_text()


def training_text(kind="mixed"):
    """Lines to train a tokenizer on. 'english' leaves out all but English and code."""
    lines = [p for p in english().split("\n") if p] + [c for c in CODE for _ in range(4)]
    if kind == "mixed":
        lines += [s for s in SENTENCES for _ in range(4)]
    rng = random.Random(7)
    lines += [" ".join(str(rng.randrange(10 ** rng.randrange(1, 7))) for _ in range(6)) for _ in range(40)]
    return lines


# --- test strings -------------------------------------------------------------------------------


def is_safe(s):
    """No surrogates, and no code point that was unassigned in Unicode 14 (but noncharacters, which stay unassigned)."""
    for c in s:
        category = unicodedata.category(c)
        if category == "Cs" or (category == "Cn" and (ord(c) & 0xFFFE) != 0xFFFE):
            return False
    return True


def cut(rng, s, longest):
    """A random piece of s, at code point boundaries, of at most longest code points."""
    if len(s) <= 1:
        return s
    a = rng.randrange(len(s))
    return s[a : a + rng.randrange(1, longest + 1)]


def random_char(rng):
    kind = rng.randrange(8)
    if kind == 0:
        return chr(rng.randrange(0x80))
    if kind == 1:
        return chr(rng.randrange(0x80, 0x800))
    if kind in (2, 3):
        return chr(rng.choice([rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x10000)]))
    if kind == 4:
        return chr(rng.randrange(0x10000, 0x20000))
    if kind == 5:
        return chr(rng.randrange(0x300, 0x370))
    if kind == 6:
        return chr(rng.randrange(0x1F300, 0x1FB00))
    return chr(rng.choice([rng.randrange(0x4E00, 0xA000), rng.randrange(0xAC00, 0xD7A4), rng.randrange(0x3040, 0x3100)]))


def words(rng):
    return rng.choice(_WORDS)


_WORDS = []


def make(rng, kind):
    text = rng.choice(SENTENCES)
    if kind == "prose":
        return cut(rng, english(), 60)
    if kind == "script":
        return cut(rng, text, 40)
    if kind == "mixed":
        parts = [cut(rng, rng.choice(SENTENCES + CODE), 12) for _ in range(rng.randrange(2, 5))]
        return rng.choice(["", " ", "", "\n"]).join(parts)
    if kind == "code":
        return cut(rng, rng.choice(CODE), 90)
    if kind == "spaces":
        parts = []
        for _ in range(rng.randrange(1, 5)):
            parts.append(rng.choice(SPACES) * rng.choice([1, 1, 2, 3, 7, 8, 17]))
            parts.append(rng.choice(["", words(rng), "x", ".", "1", cut(rng, text, 3)]))
        return "".join(parts)
    if kind == "digits":
        parts = []
        for _ in range(rng.randrange(1, 4)):
            n = rng.choice([1, 2, 3, 4, 5, 6, 9, 10, 30])
            digits = rng.choice(["0123456789"] * 5 + ["\u0660\u0661\u0662", "\u0967\u0968", "\u00b2\u00bd\u2167\u2460", "\U0001d7d8\U0001d7d9", "\u4e00\u4e8c"])
            parts.append("".join(rng.choice(digits) for _ in range(n)))
            parts.append(rng.choice(["", " ", "  ", ".", ",", "a", "\n", "e+", "-", "%"]))
        return "".join(parts)
    if kind == "special":
        parts = []
        for _ in range(rng.randrange(1, 4)):
            parts.append(rng.choice(["", " ", "  ", "\n", words(rng), words(rng) + " ", " " + words(rng), "<", "<|", cut(rng, text, 4)]))
            parts.append(rng.choice(SPECIALS))
        parts.append(rng.choice(["", " ", "\n", words(rng), " " + words(rng), ">", "|>", cut(rng, text, 4)]))
        if rng.random() < 0.2:  # almost a special token
            s = rng.choice(SPECIALS)
            parts.append(s[: rng.randrange(1, len(s))])
        return "".join(parts)
    if kind == "contraction":
        parts = []
        for _ in range(rng.randrange(1, 4)):
            parts.append(rng.choice([words(rng), words(rng).upper(), "", " ", "1", cut(rng, text, 2)]))
            parts.append(rng.choice(["'", "'", "'", "\u2019", " '", "''"]) + rng.choice(CONTRACTIONS))
            parts.append(rng.choice(["", " ", "n", "\n", "!"]))
        return "".join(parts)
    if kind == "punctuation":
        marks = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\u2026\u2014\u00ab\u00bb\u3002\u300c\u00a1\u20ac\u2192"
        parts = []
        for _ in range(rng.randrange(1, 5)):
            parts.append(rng.choice(["", " ", "\n", words(rng), "1"]))
            parts.append("".join(rng.choice(marks) for _ in range(rng.randrange(1, 6))))
            parts.append(rng.choice(["", "\n", "\r\n", "\n\n ", " "]))
        return "".join(parts)
    if kind == "emoji":
        emoji = [s for s in SENTENCES if "\U0001f468" in s or "\u2764" in s]
        parts = [cut(rng, rng.choice(emoji), 8) for _ in range(rng.randrange(1, 3))]
        parts.append(rng.choice(["", words(rng), " ", "\u200d", "\ufe0f", chr(rng.randrange(0x1F600, 0x1F640))]))
        return "".join(parts)
    if kind == "marks":
        return "".join(
            rng.choice([words(rng)[:2], cut(rng, text, 2), "e", "o", "\u1100"]) + "".join(chr(rng.randrange(0x300, 0x370)) for _ in range(rng.randrange(4)))
            for _ in range(rng.randrange(1, 6))
        )
    if kind == "normal form":
        return unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), cut(rng, text, 30))
    if kind == "control":
        return "".join(rng.choice([chr(rng.randrange(32)), chr(rng.randrange(0x7F, 0xA0)), "a", " ", words(rng)]) for _ in range(rng.randrange(1, 12)))
    if kind == "random":
        return "".join(random_char(rng) for _ in range(rng.randrange(1, 14)))
    if kind == "one":
        return random_char(rng)
    if kind == "word":
        return rng.choice(["", " ", "  "]) + words(rng) + rng.choice(["", " ", ".", "\n"])
    if kind == "odd":
        return rng.choice(ODD) + rng.choice(["", " ", words(rng), rng.choice(ODD)])
    raise ValueError(kind)


WEIGHTS = {
    "prose": 5, "script": 10, "mixed": 10, "code": 9, "spaces": 10, "digits": 8, "special": 12, "contraction": 7, "punctuation": 8,
    "emoji": 4, "marks": 4, "normal form": 6, "control": 4, "random": 6, "one": 3, "word": 3, "odd": 4,
}  # fmt: skip


def long_strings():
    """Few, since each costs as much as many short ones."""
    return [
        "a" * 3000,
        "ab" * 1000,
        " " * 2000,
        "x" + " " * 1500 + "y",
        "\n" * 1000,
        " \n" * 400,
        "\t" * 700 + "z",
        "0123456789" * 120,
        "9" * 1001,
        "=" * 1200,
        "-=" * 500,
        "'s" * 300,
        "\u00e9" * 500,
        "e\u0301" * 300,
        "\u4e16\u754c" * 150,
        "\u0915\u094d\u0937" * 100,
        "\U0001f469\u200d" * 60,
        "\u3000" * 200,
        "<|endoftext|>" * 40,
        "<s>" * 60 + "</s>" * 20,
        "<" * 300 + "|" * 300,
        "\0" * 300,
        "A" * 400 + "a" * 400,
        "aA" * 300,
        english()[:3000],
        english()[5000:6500].replace(" ", ""),
        "".join(CODE)[:2500],
        " ".join(SENTENCES)[:1500],
    ]


def test_strings(n=5000):
    if UNICODE is None:
        raise SystemExit("make the test strings with Python 3.11 (Unicode 14), so that they stay the same")
    rng = random.Random(20240601)
    _WORDS[:] = sorted({w.strip(".,;:?") for w in english().split() if len(w) > 1})[::3] + ["hello", "world", "tokenizer", "na\u00efve", "\u4e16\u754c"]
    out = ["", " ", "a", "\n"]
    out += ODD + SPECIALS + SPACES + long_strings() + SENTENCES + CODE
    out += [s + w for s in (" ", "  ", "\n") for w in ("hello", "1", "!")]
    out += [chr(c) for c in range(256)]
    seen, result = set(), []
    for s in out:
        if s not in seen and is_safe(s):
            seen.add(s)
            result.append(s)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while len(result) < n:
        s = make(rng, rng.choices(kinds, weights)[0])
        if s not in seen and is_safe(s):
            seen.add(s)
            result.append(s)
    return result
