"""instructor 1.17: one object and an iterable of objects, by calls and by a schema."""

import sys

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
messages = [{"role": "user", "content": "Ann is 30 years old and Bob is 31 years old."}]
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
    own = instructor.from_openai(client, mode=mode)
    asked = {"model": "smollm2-135m", "messages": messages, "max_tokens": 400, "temperature": 0, "max_retries": 0}
    person = own.create(response_model=Person, **asked)
    assert isinstance(person, Person), mode
    people = [*own.create_iterable(response_model=Person, **asked)]
    assert people and all(isinstance(each, Person) for each in people), mode
    *_, last = own.create_partial(response_model=Person, **asked)
    assert last.name == person.name and last.age == person.age, mode
    print(mode, person, people)
