"""instructor: an object of a pydantic model, by a tool call and as JSON of its schema.

python3 examples/clients/instructor_person.py http://127.0.0.1:8000/v1
"""

import sys

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    person = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Ann is 31 years old. Who is it?"}],
        response_model=Person,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    print(mode.name, person)
