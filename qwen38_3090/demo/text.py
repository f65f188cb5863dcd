"""What the demo model says, and the text its tokenizer learns from. All of it was written for this project."""

THOUGHT = "The person who asks wants to see whether this server works. I can only recite, so I shall recite."

ANSWER = (
    "Hello! You are talking to a tiny stand-in for Qwen3.8-27B. My weights were written by a script, not learned, "
    "which is why every question gets this same reply. What happens behind it is real, though: gated delta layers "
    "carry their running state from token to token, full attention reads its cache, and a draft head guesses "
    "several words ahead, which the main model then checks and keeps or throws away. Some guesses are wrong on "
    "purpose; look at /metrics to count them. Try streaming, tools, JSON schemas, long prompts and many requests at "
    "once: nothing here costs more than a moment of your processor. When you own a card with 24 GB of memory, serve "
    "the big model instead and ask it something better. Until then, have fun!"
)

COMMON_WORDS = """
a about above across act add after again against age ago agree air all allow almost alone along already also although
always am among amount an and animal another answer any anything appear apply are area arm around arrive art as ask at
away baby back bad bag ball bank bar base be bear beat beautiful because become bed been before began begin behind
being believe below best better between big bird bit black blood blue board boat body book born both bottom bought box
boy bread break bridge bright bring brother brought brown build building built burn bus business busy but buy by call
came can car card care carry case cat catch cause center certain chair chance change chapter check child children
choice choose church circle city class clean clear climb clock close cloud coast coat code cold collect color come
common company compare complete computer condition consider contain continue control cook cool copy corn corner
correct cost cotton could count country course cover create cross crowd cry cup current cut dance danger dark data
date day dead deal dear death decide deep degree depend describe design desk develop did die difference different
difficult dinner direct discover distance divide do doctor does dog dollar done door double doubt down draw dream
dress drink drive drop dry during each ear early earth ease east easy eat edge effect egg eight either electric else
empty end energy engine enjoy enough enter equal error even evening event ever every exact example except excite
exercise expect experience explain express eye face fact fail fair fall family famous far farm fast father fear feed
feel feet fell felt few field fight figure file fill final find fine finger finish fire first fish fit five floor flow
flower fly follow food foot for force foreign forest forget form forward found four free fresh friend from front fruit
full function game garden gas gave general gentle get girl give glad glass go gold gone good got govern grass gray
great green grew ground group grow guess guide gun had hair half hand happen happy hard has hat have he head hear
heard heart heat heavy held help her here high hill him his history hit hold hole home hope horse hospital hot hour
house how huge human hundred hunt hurry hurt I ice idea if imagine important in inch include increase indicate
industry information inside instead interest into iron is island it job join joy jump just keep kept key kill kind
king kitchen knew know known labor lady lake land language large last late laugh law lay lead learn least leave led
left leg length less let letter level lie life lift light like line list listen little live local long look lost lot
loud love low machine made mail main make man many map mark market master match material matter may me mean measure
meat meet melody member men metal method middle might mile milk million mind mine minute miss mix model modern moment
money month moon more morning most mother motion mountain mouth move much multiply music must my name nation natural
nature near necessary neck need never new news next nice night nine no noise none noon nor north nose not note nothing
notice now number object observe ocean of off offer office often oh oil old on once one only open operate opposite or
order other our out outside over own oxygen page pair paint paper paragraph parent part particular party pass past
path pattern pay peace people perhaps period person phrase picture piece place plain plan plane planet plant play
please plural point police poor position possible post pound power practice prepare present press pretty print
probable problem process produce product program proper protect prove provide public pull push put quality question
quick quiet quite race radio rain raise ran range rather reach read ready real reason receive record red region
remember repeat reply report represent require rest result return rich ride right ring rise river road rock roll room
root rope rose round row rule run safe said sail salt same sand sat save saw say scale school science score sea search
season seat second section see seed seem select self sell send sense sentence separate serve set settle seven several
shall shape share sharp she sheet shell shine ship shoe shop short should shoulder shout show side sight sign silent
silver similar simple since sing single sister sit six size skill skin sky sleep slow small smell smile snow so soft
soil soldier solution solve some son song soon sound south space speak special speed spell spend spoke spot spread
spring square stand star start state station stay steam steel step stick still stone stood stop store story straight
strange stream street stretch string strong student study subject substance succeed success such sudden sugar suggest
suit summer sun supply support sure surface surprise swim symbol system table tail take talk tall teach team teeth
tell temperature ten term test than thank that the their them then there these they thick thin thing think third this
those though thought thousand three through throw thus tie time tiny to together told tone too took tool top total
touch toward town track trade train travel tree triangle trip trouble truck true try tube turn twenty two type under
unit until up upon us use usual valley value vary verb very view village visit voice vowel wait walk wall want war
warm was wash watch water wave way we wear weather week weight well went were west what wheel when where whether which
while white who whole whose why wide wife wild will win wind window wing winter wire wish with woman women wonder wood
word work world would write written wrong wrote yard year yellow yes yet you young your
"""

PROSE = """
A lamp stood in the window of a house at the edge of the sea. Every evening an old woman lit it, and every morning she
put it out. "Why do you do this?" asked the boy who brought her bread. "No ship has come this way in twenty years."
She smiled and said: "Then nobody has been lost here in twenty years either."

The boy thought about her answer for a long time. When winter came and the woman fell ill, he climbed the stairs
himself, filled the lamp with oil, and trimmed the wick. The wind was loud that night. Far out, where the water is
black, a small light turned toward the land, slowly, as if it had been waiting to be called.

How does a language model write? It reads a text as a list of tokens, and for each position it computes how likely
every token of its vocabulary is to come next. One token is chosen, added to the list, and the model starts again. A
server keeps what it has already computed: the keys and values of the attention layers grow with each token, while a
recurrent layer has a state of fixed size, which each token changes. Speculative decoding makes this faster. A small
draft model proposes several tokens; the large model checks them all in one step, accepts those it agrees with, and
corrects the first one it doesn't.

Hello! Hi there. Good morning. Thank you very much. Please explain this. What is the weather like in Paris today? Who
are you? Write a short story about a dog. Tell me a joke. Translate this sentence into French, German or Spanish.
Summarize the text below in three sentences. What is 12 + 30? Count from 1 to 10. List five colors: red, green, blue,
yellow, black. I don't know. It's fine, isn't it? They're here, we've seen them, she'll come, he'd say so, I'm sure.
You are a helpful assistant.

def add(left: int, right: int) -> int:
    \"\"\"Return the sum of two numbers.\"\"\"
    return left + right

class Counter:
    def __init__(self, start=0):
        self.value = start

    def step(self):
        for index in range(10):
            if index % 2 == 0:
                self.value += index
        return self.value

import json
print(json.dumps({"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}))
const total = items.map((item) => item.price * 2).filter(Boolean);
for (int i = 0; i < n; i++) { sum += a[i]; }
SELECT name, age FROM people WHERE age >= 18 ORDER BY name;

{"type": "function", "function": {"name": "search", "description": "Search the web", "parameters": {"type": "object",
"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "tags": {"type": "array", "items": {"type":
"string"}}, "exact": {"type": "boolean"}}, "required": ["query"]}}}
[{"id": 1, "ok": true, "error": null}, {"id": 2, "ok": false, "error": "not found"}]

<function=search>
<parameter=query>
tide tables
</parameter>
<parameter=limit>
5
</parameter>
</function>

| name | value |
|------|-------|
| one  | 1     |

# Title
## Section
- first item
- second item
1. number one
2. number two
**bold**, *italic*, `code`, [link](https://example.com/path?query=1), user@example.com,
$5.00, 100%, 3.14, 2026-01-31, 12:30.
Grüße aus Köln, déjà vu, mañana, São Paulo, naïve café, Ελλάδα, Москва, 東京, 你好, 안녕.
"""


ROLES = "system\nuser\nassistant\ntool\nfunction\nparameter\n"


def training_text() -> list[str]:
    """What the tokenizer learns from: what the model says, prose, common words with a space, capitalised, and bare."""
    words = COMMON_WORDS.split()
    spoken = [THOUGHT, ANSWER] * 8 + [PROSE, ROLES] * 3
    return [*spoken, *([" " + " ".join(words)] * 3), *(f"{word.capitalize()} {word}" for word in words)]
