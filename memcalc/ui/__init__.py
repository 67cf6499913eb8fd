"""``memcalc ui``: the calculator as a page in the browser, served on loopback by the standard library.

words    the query of an address ⇄ the options of the command line
answers  what the page shows: an estimate, its figure, the plans that ``memcalc recommend`` finds
server   which requests are answered, and which are refused
page/    the page itself: HTML, CSS and JavaScript without a framework, and without a request to anywhere else
"""
