"""How the page of a run looks, on a screen and on paper."""

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1c1e21; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem;
  border-bottom: 1px solid #d5d8dc; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.headline { font-size: 1.1rem; color: #444a52; margin: 0; }
.warning { border-left: .3rem solid #c0392b; padding-left: .6rem; font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid #e8eaed; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; }
td:first-child { white-space: nowrap; }
img { display: block; max-width: 100%; height: auto; margin: .8rem 0; }
pre { overflow-x: auto; background: #f6f7f8; padding: .8rem; font-size: .82rem; line-height: 1.4; }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: #444a52; margin: .5rem 0; }
@page { margin: 1.5cm; }
@media print {
  body { font-size: 11px; }
  main { max-width: none; padding: 0; }
  section { break-inside: auto; }
  img, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; }
}
"""
