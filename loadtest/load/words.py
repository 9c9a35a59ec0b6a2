"""Filler text for prompts: words that are one token each, with the space before them, in most vocabularies."""

from __future__ import annotations

import random

# Short lower-case words and word beginnings that are whole tokens of SmolLM2's vocabulary.
_TEXT = """
ability able about above accept access account achie across action activity actually address adult affect after
again against allow allows almost along already always among amount analy analysis animals another answ approach
arch area areas around article aspect assess author avoid away back based became because become been before began
begin behavior being below benefits best better between black body book both brain break bring build building
business call called came cannot capt care case cases caus cause cell cells century certain change changes check
chemical child children circ city claim class clean clear climate clos close collect color come comes commit common
company compet compon computer concept concern conduct connect consist cont contact content context continue control
cost could count country cour course creat create created creating critical cultural culture current data days deep
demon demonstr desc design designed dest detail diet diff direct doct does doesn doing done down draw during each
early easy economic effect effects effic either elect elements else emerg emot encou energy engine enjoy ensure
entire even event events ever every everyone evidence example except exerc exist expect explore express extra face
factors fail fall family farm feed feel field file find first fish five flow focus food fore form forms found four
free frequ friends from full function fund further future general give given global going good great green ground
group groups grow growth half hand hard harm have having head health healthy heart heat heav help helps here high
higher history hold home hours house however human idea ideas identify image impact import include increase industry
instance instead integ interact interest into involved issues itself just keep kind known land language larg large
last later lead learn learning least left less level levels life light like likely line link list little live lives
living local long look loss love lower mach made main major make makes making many mark market mass material matter
mean meaning means meas measure mechan medic medical meet members mess method methods micro might mill million mind
minim model modern money months more most move much multiple music must name national natural nature near need
needed needs never next norm number object offer offic often once online only open order original other others over
paper parent parents part parts pass past path patients pattern people percent perform period personal physical
place plan plant plants play point popular port position positive post power practice present press pressure prevent
previous print priv problem problems process produ produce product products prog program programs project proper
prote provide provided provides psych public quality question quick range rate rather react read reading real really
reason rece recent recomm record reduce reflect region regular related remain report require required rese researc
research response rest result results return review right rights risk role said same says school schools science
scient second seem seen select self sense sent separ service services several share short should show shows side
sign similar simple simply since sing single site size skills skin sleep small social society soft soil some someone
sound source sources space special species specific stand start state states step still stories story streng stress
strong student students studies study subject subst success such suff suggest super support sure surface sust
symptoms system systems take taken taking target team tell term terms test text than that their them then thera
there these they thing things think this those though thought three through time times today toget together took
tool tools total toward towards training treat true turn type types under unique unit until upon used using usually
value values various very vide view want water ways week weight well were what when where whether which while white
whole will wind with within without women word words work working works world would writing year years young your
yourself
"""
WORDS = tuple(_TEXT.split())


def filler(randomness: random.Random, num_tokens: int) -> str:
    """Text of about num_tokens (at least 1) tokens; how many it is for a model, its server's usage says."""
    return " ".join(randomness.choices(WORDS, k=max(1, num_tokens)))
