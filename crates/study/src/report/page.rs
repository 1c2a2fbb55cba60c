//! What every page has: style, font, colours in light and dark, and what the browser may do.

use super::escape::markup;
use super::scene::Ink;
use std::fmt::Write;

pub const REGULAR: &[u8] = include_bytes!("font/Regular.otf");
pub const BOLD: &[u8] = include_bytes!("font/SemiBold.otf");
const STYLE: &str = include_str!("page/page.css");
/// Tips over marks, and downloads.
pub const FIGURES: &str = include_str!("page/figures.js");

/// Everything up to the body. `connect` lets the page ask its own server.
pub fn head(title: &str, connect: bool) -> String {
    let connect = if connect { "; connect-src 'self'" } else { "" };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'; font-src data:; img-src data: blob:; base-uri 'none'; form-action 'none'{connect}\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>{}</title>\n<style id=\"font\">{}</style>\n<style>{}{STYLE}</style>\n</head>\n",
        markup(title),
        font(),
        colours()
    )
}

/// Both weights as rules of CSS, with the files in them.
pub fn font() -> String {
    let face = |bytes: &[u8], weight: u32| {
        format!(
            "@font-face{{font-family:Report;font-weight:{weight};font-display:block;\
             src:url(data:font/otf;base64,{}) format(\"opentype\")}}",
            base64(bytes)
        )
    };
    face(REGULAR, 400) + &face(BOLD, 600)
}

/// Variables for every ink, and the classes that use them.
fn colours() -> String {
    let (mut light, mut dark, mut classes) = (String::new(), String::new(), String::new());
    for ink in Ink::ALL {
        let name = ink.name();
        let _ = write!(light, "--{name}:#{:06x};", ink.light());
        let _ = write!(dark, "--{name}:#{:06x};", ink.dark());
        let _ = write!(
            classes,
            ".f-{name}{{fill:var(--{name})}}.l-{name}{{stroke:var(--{name});fill:none}}.c-{name}{{color:var(--{name})}}\
             .k-{name}{{background:var(--{name})}}"
        );
    }
    format!(
        ":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n@media print{{:root{{{light}}}}}\n\
         {classes}.hollow{{fill:var(--paper)}}\
         .halo{{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}}\n"
    )
}

pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word =
            chunk.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() { digit as char } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
