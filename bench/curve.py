"""Draws the learning curve of a run.

    python bench/curve.py RUN/metrics.csv curve.svg
"""

import csv
import sys

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 760, 360, 56, 28, 44, 56


def main(source, target):
    rows = list(csv.DictReader(open(source)))
    train = [(int(r["step"]), float(r["loss"])) for r in rows if r["loss"]]
    evals = [(int(r["step"]), float(r["eval_loss"]), float(r["eval_top1"])) for r in rows if r["eval_loss"]]
    last = max(step for step, _ in train)
    top = max(2.5, max(loss for _, loss in smooth(train)))

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(share):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def line(points, colour):
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(6):
        height = y(tick / 5)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{top * tick / 5:.1f}</text>')
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{height + 4:.1f}" fill="#0a7">{20 * tick}%</text>')
    for tick in range(0, 6):
        step = last * tick / 5
        out.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    out.append(line([(s, v / top) for s, v in smooth(train)], "#37c"))
    out.append(line([(s, v / top) for s, v, _ in evals], "#c53"))
    out.append(line([(s, a) for s, _, a in evals], "#0a7"))
    legend = [("training loss", "#37c"), ("validation loss", "#c53"), ("validation top-1", "#0a7")]
    for i, (name, colour) in enumerate(legend):
        left = LEFT + 150 * i
        out.append(f'<line x1="{left}" x2="{left + 22}" y1="14" y2="14" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{left + 28}" y="18">{name}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text></svg>')
    open(target, "w").write("\n".join(out) + "\n")


def smooth(points, parts=200):
    """Means over equal parts."""
    size = max(1, len(points) // parts)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(c[len(c) // 2][0], sum(v for _, v in c) / len(c)) for c in chunks]


if __name__ == "__main__":
    main(*sys.argv[1:])
