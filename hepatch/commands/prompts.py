"""The instructions that the demo's model answers: short and long ones in one batch, so that rows are padded."""

from __future__ import annotations

PROMPTS = (
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What is the capital of Japan?",
    "Give a synonym for 'quick' and use it in a sentence.",
    "My train leaves at 9:40 and the walk to the station takes 25 minutes. When should I leave home at the latest?",
    "Explain to a child of ten, in two sentences, why the sky is blue.",
    "Say hello.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron, and why do people often get this wrong?",
    "List two things to check before riding a bicycle.",
    "Translate 'good morning' into French.",
    "A shop sells pens at 3 for 2 euros. I have 10 euros and want as many pens as possible. How many do I get?",
    "Suggest a title for a story about a lighthouse keeper who is afraid of the dark.",
    "Why does ice float?",
    "Rewrite this politely: 'Send me the report now.'",
    "I have rice, eggs, an onion and soy sauce in the kitchen, and about twenty minutes. What can I cook for dinner?",
    "What does a compiler do? Answer in one short sentence.",
)
