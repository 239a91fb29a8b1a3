"""Answers with a form: JSON for a schema, a choice, a pattern."""

import json

from octavo import LLM, SamplingParams, StructuredOutput

book = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1800, "maximum": 2030},
        "genres": {"type": "array", "items": {"enum": ["novel", "poems", "essay"]}, "maxItems": 2},
    },
    "required": ["title", "year", "genres"],
    "additionalProperties": False,
}
questions = {
    "Invent a book and describe it as JSON with title, year and genres.": StructuredOutput(json_schema=book),
    "Is the sea salty? Answer yes or no.": StructuredOutput(regex="yes|no"),
    "When did it happen? Give a date.": StructuredOutput(
        regex=r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
    ),
}

with LLM("smollm2-135m") as llm:
    for question, form in questions.items():
        params = SamplingParams(max_tokens=120, structured_output=form)
        output = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0]
        print(f"{question}\n  {output.text}")
        if form.json_schema:
            print(f"  a book of {json.loads(output.text)['year']}")
