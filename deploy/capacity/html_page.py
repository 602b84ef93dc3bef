"""One self-contained HTML page: headings, facts, tables, bars and (from `html_charts`) plots. Pure text, nothing is fetched.

A page works without internet and without scripts; the script only adds what is told under the pointer. Light and dark follow the
reader's system, and columns become one on a phone. Everything the caller gives is escaped here; what these functions return is HTML.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Html = str


@dataclass(frozen=True)
class Section:
    """`parts`: what `facts`, `table`, `bars` and the charts return. Charts stand beside each other where there is room."""

    title: str
    parts: Sequence[Html]
    note: str = ""


def page(title: str, lead: str, sections: Sequence[Section]) -> Html:
    body = "".join(
        f"<section><h2>{escape(section.title)}</h2>"
        + (f'<p class="note">{escape(section.note)}</p>' if section.note else "")
        + f'<div class="parts">{"".join(section.parts)}</div></section>'
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f'<body><header><h1>{escape(title)}</h1><p class="note">{escape(lead)}</p></header><main>{body}</main>'
        f'<div id="tip" hidden></div><script>{_SCRIPT}</script></body></html>\n'
    )


def facts(pairs: Sequence[tuple[str, str]]) -> Html:
    """Large figures, each with its name above."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts wide">{cells}</dl>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Html:
    """The first column is text, the others are figures (set to the right)."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<figure class="card wide">{caption}<div class="scroll">{inner}</div></figure>'


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> Html:
    """Lengths to compare, from 0: (name, value, the value as text)."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    lines = "".join(
        f'<div class="bar"><span>{escape(name)}</span><i><b style="width:{100 * max(value, 0) / most:.2f}%"></b></i>'
        f"<span>{escape(text)}</span></div>"
        for name, value, text in rows
    )
    return f'<figure class="card"><figcaption>{escape(title)}</figcaption>{lines}</figure>'


def number(value: float) -> str:
    """As a reader wants it: 12.3k rather than 12345.678."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000 if suffix == 'k' else size):.3g}{suffix}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


_STYLE = """
:root{color-scheme:light dark;--page:#f6f6f3;--card:#fdfdfc;--line:#e3e2dc;--grid:#e9e8e3;--ink:#14140f;--soft:#5c5b55;
--c0:#2a78d6;--c1:#e0642f;--c2:#12996a;--c3:#b98200;--c4:#5b4bc0;--c5:#d6453f}
@media(prefers-color-scheme:dark){:root{--page:#141413;--card:#1c1c1a;--line:#33322f;--grid:#2a2927;--ink:#f2f1ec;--soft:#a9a79e;
--c0:#5a9cf0;--c1:#ec7d4c;--c2:#35b98a;--c3:#d9a428;--c4:#9a8ff0;--c5:#ee7772}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main{max-width:1180px;margin:0 auto;padding:0 20px}header{padding-top:36px}main{padding-bottom:56px}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:36px 0 4px}
.note{color:var(--soft);margin:4px 0 12px;max-width:75ch}
.parts{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));align-items:start}
.wide{grid-column:1/-1}.card{margin:0;padding:14px 16px;background:var(--card);border:1px solid var(--line);border-radius:10px;min-width:0}
figcaption{font-weight:600;margin-bottom:6px}small{color:var(--soft);font-weight:400;font-size:13px;margin-left:6px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(135px,1fr));margin:8px 0 0;background:var(--card);
border:1px solid var(--line);border-radius:10px;overflow:hidden}
.facts div{padding:10px 14px;box-shadow:1px 0 var(--line),0 1px var(--line)}dt{color:var(--soft);font-size:13px}
dd{margin:0;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
th{border-top:0;color:var(--soft);font-weight:500;font-size:13px}
th:first-child,td:first-child{text-align:left;padding-left:0}td:last-child,th:last-child{padding-right:0}
.bar{display:grid;grid-template-columns:minmax(70px,30%) 1fr auto;gap:10px;align-items:center;padding:3px 0;font-variant-numeric:tabular-nums}
.bar span:first-child{overflow-wrap:anywhere}.bar b{display:block;height:14px;border-radius:0 4px 4px 0;background:var(--c0);min-width:2px}
.key{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);margin-bottom:4px}
.key span::before{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle;
background:var(--c)}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
svg text{fill:var(--soft);font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft);stroke-opacity:.5}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.column{fill:var(--c0)}.column:hover{fill-opacity:.7}.cross{stroke:var(--soft);stroke-dasharray:3 3}
.dot{fill:var(--c);stroke:var(--card);stroke-width:2}
#tip{position:fixed;z-index:9;pointer-events:none;max-width:260px;padding:6px 10px;border-radius:8px;background:var(--card);color:var(--ink);
border:1px solid var(--line);box-shadow:0 4px 16px #0003;font-size:13px;font-variant-numeric:tabular-nums}
#tip b{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px;background:var(--c)}
@media(max-width:520px){.wide svg{width:640px}header,main{padding-left:12px;padding-right:12px}.card{padding:12px}svg text{font-size:15px}
.bar{grid-template-columns:minmax(60px,34%) 1fr auto}}
@media print{.card{break-inside:avoid}}
"""

# Each chart carries its points in data-points: [[name, colour, [[x, y, "x as text", "y as text"], ...]], ...] in the SVG's own units.
_SCRIPT = """
const tip=document.getElementById('tip');
document.querySelectorAll('svg[data-points]').forEach(svg=>{
const series=JSON.parse(svg.dataset.points),layer=svg.querySelector('.pointer'),[top,bottom]=svg.dataset.span.split(' ');
const clear=()=>{layer.replaceChildren();tip.hidden=true};
const draw=(tag,set)=>{const node=document.createElementNS(svg.namespaceURI,tag);for(const k in set)node.setAttribute(k,set[k]);
layer.append(node);return node};
svg.addEventListener('pointerleave',clear);
svg.addEventListener('pointermove',event=>{
const at=new DOMPoint(event.clientX,event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
const nearest=points=>{let low=0,high=points.length-1;while(high-low>1){const mid=low+high>>1;points[mid][0]<at?low=mid:high=mid}
return Math.abs(points[low][0]-at)<=Math.abs(points[high][0]-at)?points[low]:points[high]};
const found=series.filter(one=>one[2].length).map(one=>[one,nearest(one[2])]);
if(!found.length)return;
clear();
const first=found.reduce((a,b)=>Math.abs(b[1][0]-at)<Math.abs(a[1][0]-at)?b:a)[1];
draw('line',{x1:first[0],x2:first[0],y1:top,y2:bottom,class:'cross'});
const head=document.createElement('div');head.textContent=first[2];tip.replaceChildren(head);
for(const [one,point] of found){
draw('circle',{cx:point[0],cy:point[1],r:4.5,class:'dot'}).style.setProperty('--c',`var(--c${one[1]})`);
const row=document.createElement('div'),mark=document.createElement('b');mark.style.setProperty('--c',`var(--c${one[1]})`);
row.append(mark,(one[0]?one[0]+': ':'')+point[3]);tip.append(row)}
tip.hidden=false;
const box=tip.getBoundingClientRect();
tip.style.left=Math.max(4,Math.min(event.clientX+14,innerWidth-box.width-8))+'px';
tip.style.top=Math.max(4,event.clientY-box.height-12)+'px'})});
"""
