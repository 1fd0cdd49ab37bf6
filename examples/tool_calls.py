"""Make a small data set that teaches a model to answer a spoken request with one tool call.

    python examples/tool_calls.py tool_calls/        # writes tool_calls/train.jsonl and tool_calls/heldout.jsonl

Every row is one chat: a short system line, a request, and the call as JSON in one fixed spelling, so that a plain
    string
comparison tells whether an answer is right. The held-out rows use sentences and values (names, cities, numbers) of
which none
occurs in the training rows: a model that gets them right has learnt the task and has not remembered the rows.
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SYSTEM = "Answer with one tool call as JSON."
NUM_TRAIN = 640
NUM_HELDOUT = 160

NUMBERS = ("minutes", "degrees")
MINUTES_HELDOUT = (7, 13, 18, 22, 27, 34, 38, 41, 47, 52, 56)


def alternatives(values: Iterable[object]) -> str:
    return "|".join(map(str, values))


# Values that a request can name, with | between them: those of the training rows, and those kept for the held-out rows.
VALUES: dict[str, tuple[str, str]] = {
    "minutes": (alternatives(m for m in range(2, 61) if m not in MINUTES_HELDOUT), alternatives(MINUTES_HELDOUT)),
    "time": (
        alternatives(f"{hour}:{minute}" for hour in range(5, 23) for minute in ("00", 10, 15, 20, 30, 40, 45, 50)),
        alternatives(f"{hour}:{minute}" for hour in range(5, 23) for minute in ("05", 25, 35, 55)),
    ),
    "artist": (
        "Nina Simone|The Beatles|Bach|Miles Davis|Adele|Johnny Cash|Daft Punk|Billie Holiday|Queen|Mozart|Radiohead|"
        "Aretha Franklin|Bob Marley|Chopin|Fleetwood Mac|Ella Fitzgerald|Pink Floyd|Dolly Parton|Vivaldi|Elton John|"
        "Joni Mitchell|Duke Ellington|Blondie|Ray Charles",
        "Stevie Wonder|Beethoven|Coldplay|Louis Armstrong|Kate Bush|David Bowie|Nirvana|Debussy|Tina Turner",
    ),
    "to": (
        "Anna|Ben|Carla|David|Emma|Farid|Grace|Henry|Ivy|Jonas|Kim|Lena|Marco|Nora|Oscar|Paula|Quinn|Rosa|Sam|Tara|"
        "Uma|Victor|Wendy|my mother|my boss",
        "Alice|Boris|Clara|Diego|Fiona|Gabriel|Hannah|Leo|my brother|my doctor",
    ),
    "text": (
        "I am running late|dinner is ready|the train is full|call me back|happy birthday|see you at six|"
        "the meeting is cancelled|I found the keys|thank you for the flowers|we need more paint|the door is open|"
        "I will be home soon|good luck today|the dog is fine|bring your coat|lunch is on me|the car is fixed|"
        "I missed the bus|save me a seat|the parcel came|the oven is still on|the shop closes at five",
        "I am at the station|the kids are asleep|the roof is leaking|buy two tickets|the plane has landed|"
        "we won the game|I lost my phone|the soup is cold|keep the receipt",
    ),
    "city": (
        "Paris|London|Tokyo|Madrid|Boston|Cairo|Dublin|Geneva|Hamburg|Istanbul|Jakarta|Kyoto|Lima|Milan|Nairobi|Oslo|"
        "Porto|Quebec|Rome|Seattle|Toronto|Vienna|Warsaw|Zurich|New York|Cape Town",
        "Berlin|Chicago|Lisbon|Mumbai|Prague|Sydney|Athens|Denver|Helsinki|San Francisco",
    ),
    "item": (
        "milk|bread|green apples|coffee|olive oil|batteries|rice|tomatoes|toothpaste|butter|orange juice|soap|onions|"
        "cat food|yogurt|paper towels|eggs|sugar|black tea|light bulbs|carrots|cheese|stamps|red wine",
        "bananas|flour|oat milk|candles|garlic|dog food|honey|potatoes|printer ink|salt",
    ),
    "room": (
        "kitchen|bedroom|hall|bathroom|office|garage|attic|nursery|cellar|dining room|guest room|study",
        "living room|laundry|workshop|library|porch|playroom",
    ),
    "degrees": ("15|16|18|19|20|22|24|25|26", "17|21|23"),
}

# Per tool: sentences of the training rows, then sentences kept for the held-out rows.
REQUESTS: dict[str, tuple[list[str], list[str]]] = {
    "set_timer": (
        [
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "Count down {minutes} minutes.",
            "I need a timer, {minutes} minutes please.",
            "Remind me when {minutes} minutes have passed.",
            "Timer, {minutes} minutes.",
            "Let me know in {minutes} minutes.",
            "Give me {minutes} minutes on the clock.",
            "The pasta takes {minutes} minutes, start the timer.",
            "Ring in {minutes} minutes.",
            "Can you time {minutes} minutes for me?",
            "Beep after {minutes} minutes.",
            "Put {minutes} minutes on the kitchen timer.",
            "Start counting {minutes} minutes now.",
        ],
        [
            "Please start a countdown of {minutes} minutes.",
            "Tell me when {minutes} minutes are over.",
            "My eggs need {minutes} minutes, set a timer.",
            "Could you set the timer to {minutes} minutes?",
        ],
    ),
    "set_alarm": (
        [
            "Wake me up at {time}.",
            "Set an alarm for {time}.",
            "I have to get up at {time}.",
            "Alarm at {time}, please.",
            "Make sure I am awake at {time}.",
            "Ring the alarm at {time}.",
            "Put my alarm on {time}.",
            "Get me out of bed at {time}.",
            "Can you wake me at {time} tomorrow?",
            "I want to be up by {time}.",
            "New alarm, {time}.",
            "Tomorrow the alarm should ring at {time}.",
            "Schedule an alarm for {time}.",
            "Do not let me sleep past {time}.",
        ],
        [
            "Please wake me tomorrow at {time}.",
            "I need an alarm at {time}.",
            "Could you set my alarm to {time}?",
            "My day starts at {time}, wake me then.",
        ],
    ),
    "play_music": (
        [
            "Play {artist}.",
            "Put on some {artist}.",
            "I want to hear {artist}.",
            "Play a song by {artist}.",
            "Some music by {artist}, please.",
            "Let us listen to {artist}.",
            "Start playing {artist}.",
            "Can you play {artist} for me?",
            "I am in the mood for {artist}.",
            "Shuffle songs by {artist}.",
            "Turn on {artist} in the background.",
            "Find something by {artist} and play it.",
            "Music, {artist}.",
            "How about an album by {artist}?",
        ],
        [
            "I would like to listen to {artist}.",
            "Please put {artist} on.",
            "Could you start some music by {artist}?",
            "Play me something from {artist}.",
        ],
    ),
    "send_message": (
        [
            "Tell {to} that {text}.",
            "Text {to}: {text}.",
            "Send {to} a message saying {text}.",
            "Message {to} that {text}.",
            "Let {to} know that {text}.",
            "Write to {to}: {text}.",
            "Send a text to {to} that says {text}.",
            "Can you tell {to} that {text}?",
            "New message for {to}: {text}.",
            "Drop {to} a line, {text}.",
            "Say to {to}: {text}.",
            "I want {to} to know that {text}.",
            "Please inform {to} that {text}.",
            "Message to {to}, {text}.",
        ],
        [
            "Send this to {to}: {text}.",
            "Please text {to} that {text}.",
            "Could you write {to} that {text}?",
            "Give {to} this message: {text}.",
        ],
    ),
    "get_weather": (
        [
            "What is the weather in {city}?",
            "Will it rain in {city} today?",
            "How warm is it in {city}?",
            "Weather for {city}, please.",
            "Do I need an umbrella in {city}?",
            "Tell me the forecast for {city}.",
            "Is it sunny in {city}?",
            "How is the weather over in {city}?",
            "Check the weather in {city}.",
            "Is it cold in {city} right now?",
            "Give me a weather report for {city}.",
            "What should I wear in {city} today?",
            "Any snow in {city}?",
            "Look up the forecast in {city}.",
        ],
        [
            "What will the weather be like in {city}?",
            "Is it raining in {city}?",
            "Show me the weather for {city}.",
            "How cold does it get in {city} tonight?",
        ],
    ),
    "add_to_list": (
        [
            "Add {item} to my shopping list.",
            "Put {item} on the list.",
            "We are out of {item}.",
            "I need to buy {item}.",
            "Remember to get {item}.",
            "Write {item} on the shopping list.",
            "We need more {item}.",
            "Shopping list, {item}.",
            "Can you add {item} to the list?",
            "Next time at the store I want {item}.",
            "Note down {item} for the shopping.",
            "There is no {item} left.",
            "Do not let me forget to buy {item}.",
            "Also get {item} at the shop.",
        ],
        [
            "Please put {item} on my shopping list.",
            "We have run out of {item}.",
            "Could you note that we need {item}?",
            "Add some {item} to the shopping.",
        ],
    ),
    "switch_light": (
        [
            "Turn {on} the light in the {room}.",
            "Switch {on} the {room} light.",
            "Turn the {room} light {on}.",
            "Lights {on} in the {room}.",
            "Switch the lamp in the {room} {on}.",
            "Can you turn {on} the {room} lights?",
            "The light in the {room} should be {on}.",
            "I want the {room} light {on}.",
            "Make sure the {room} light is {on}.",
            "{room} light {on}.",
            "Put the {room} lights {on}.",
            "Flip the {room} light {on}.",
            "In the {room}, turn the lamp {on}.",
            "Please have the {room} lamp {on}.",
        ],
        [
            "Please turn the lights {on} in the {room}.",
            "Could you switch the {room} light {on}?",
            "Light {on} in the {room}, please.",
            "Turn {on} the lamp in the {room}.",
        ],
    ),
    "set_temperature": (
        [
            "Set the {room} to {degrees} degrees.",
            "Heat the {room} to {degrees} degrees.",
            "Make it {degrees} degrees in the {room}.",
            "I want {degrees} degrees in the {room}.",
            "Change the {room} temperature to {degrees}.",
            "Turn the heating in the {room} to {degrees}.",
            "Thermostat in the {room}, {degrees} degrees.",
            "The {room} should be at {degrees} degrees.",
            "Bring the {room} to {degrees} degrees.",
            "Can you set the heating in the {room} to {degrees}?",
            "Keep the {room} at {degrees} degrees.",
            "Adjust the {room} to {degrees} degrees.",
            "Put the {room} thermostat on {degrees}.",
            "{degrees} degrees for the {room}, please.",
        ],
        [
            "Please warm the {room} to {degrees} degrees.",
            "Could you make the {room} {degrees} degrees?",
            "Set the temperature in the {room} to {degrees}.",
            "The {room} needs to be {degrees} degrees.",
        ],
    ),
}


def tool_call(tool: str, arguments: dict[str, Any]) -> str:
    """Write one call in the only spelling that counts as right, e.g. `{"tool": "set_timer", "arguments": {"minutes":
    5}}`."""
    return json.dumps({"tool": tool, "arguments": arguments}, ensure_ascii=False)


def make_row(tool: str, sentence: str, split: int, rng: random.Random) -> dict[str, Any]:
    """Fill one sentence with values of the training split (0) or the held-out split (1)."""
    named = [name for name in VALUES if f"{{{name}}}" in sentence]
    spoken = {name: rng.choice(VALUES[name][split].split("|")) for name in named}
    arguments: dict[str, Any] = {name: int(word) if name in NUMBERS else word for name, word in spoken.items()}
    if tool == "switch_light":
        arguments["on"] = rng.random() < 0.5
        spoken["on"] = "on" if arguments["on"] else "off"
    request = sentence.format(**spoken)
    request = request[0].upper() + request[1:]
    # People type as well as they speak: some requests come without capital and full stop.
    if rng.random() < 0.25:
        request = (request if request.startswith("I ") else request[0].lower() + request[1:]).removesuffix(".")
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": request},
        {"role": "assistant", "content": tool_call(tool, arguments)},
    ]
    return {"messages": messages}


def make_rows(num_rows: int, split: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield rows without repeats; the tools take turns, so each has the same share."""
    seen: set[str] = set()
    tools = list(REQUESTS)
    while len(seen) < num_rows:
        tool = tools[len(seen) % len(tools)]
        row = make_row(tool, rng.choice(REQUESTS[tool][split]), split, rng)
        request = row["messages"][1]["content"]
        if request not in seen:
            seen.add(request)
            yield row


def write_split(path: Path, num_rows: int, split: int, seed: int) -> None:
    """Write one split as JSONL, shuffled; the same seed gives the same bytes on every machine."""
    rng = random.Random(seed)
    rows = list(make_rows(num_rows, split, rng))
    rng.shuffle(rows)
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_split(folder / "train.jsonl", NUM_TRAIN, split=0, seed=1)
    write_split(folder / "heldout.jsonl", NUM_HELDOUT, split=1, seed=2)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tool_calls"))
