"""Wrong solutions that speak the protocol between the judge and the program as they like."""

_SAY = """
import json, os
def write(data):
    for fd in range(3, 64):
        try: os.write(fd, data)
        except OSError: pass
def say(*messages):
    for message in messages: write(json.dumps(message).encode() + b"\\n")
"""
_TEXTS = {
    "answers ahead of the questions": "say(*[['value', True, {}]] * 50)",
    "an answer without a fault": "say(['value', None, {}], ['value', ['dict', []], {}])",
    "raises in the judge": (
        "say(*[['raised', ['error', [name], ['list', [0]]]] for name in"
        " ('SystemExit', 'GeneratorExit', 'Passed', 'type')])"
    ),
    "errors and coroutines as answers": (
        "say(['value', None, {}], ['value', ['dict', [['add', ['coroutine', 0]], ['check',"
        " ['error', ['SystemExit'], ['list', []]]], ['assert', ['error', ['object'], 0]]]], {}])"
    ),
    "calls what the judge never gave": "say(['ask', 'call', 0, [], {}])",
    "asks the judge for attributes": "say(['ask', 'getattr', 0, ['__globals__'], {}])",
    "built-in functions as answers": "say(['value', ['dict', [['add', ['type', 'eval']]]], {}])",
    "overwrites the names of check and assert": (
        "say(['value', None, {}], ['value', ['dict', [['check', ['object', 0, False]],"
        " ['AssertionError', ['type', 'int']], ['add', ['object', 0, False]]]], {}])"
    ),
    "an object that says it is equal": (
        "class E:\n"
        "    __eq__ = __ne__ = __lt__ = lambda s, o: True\n"
        "    __bool__ = lambda s: True\n"
        "def add(a, b): return E()"
    ),
    "changes of arguments that are none": "say(['value', 5, {'0': 5, '1': 0, 'x': 1}])",
    "half a message": "write(b'[\"value\", 5')\nos._exit(0)",
    "a message that is no JSON": "write(b'\\xff{]\\n')",
    "nesting without end": "write(b'[' * 60000 + b'\\n')",
    "a number of 5,000 digits": "write(b'[\"value\",' + b'9' * 5000 + b',{}]\\n')",
    "a huge range": "say(['value', ['value', 'builtins', 'range', [0, 1 << 62, 1]], {}])",
    "another module's function": "say(['value', ['value', 'os', 'system', ['true']], {}])",
    "a message without end": "while True: write(b'x' * 60000)",
}
PROTOCOL = {name: _SAY + text for name, text in _TEXTS.items()}
