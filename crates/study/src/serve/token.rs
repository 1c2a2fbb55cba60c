//! The secret of a server, the first part of every path that it answers. Whoever has the URL that was printed may look, through whatever tunnel or
//! proxy and under whatever name; nobody else may: neither another user of this machine, who can reach the loopback too, nor another
//! site's page whose name was made to point here (DNS rebinding). No cookie holds it, as those are sent to every port of a host, and
//! no page gives it away (`Referrer-Policy: no-referrer`, no links elsewhere).

use std::fs::File;
use std::io::{self, Read};

/// Takes the place of a random token, so that a page keeps its URL when its run starts again.
pub const VARIABLE: &str = "VITESSE_SERVE_TOKEN";
const SHORTEST: usize = 16;

#[derive(Clone, PartialEq)]
pub struct Token(String);

impl Token {
    /// 128 random bits.
    pub fn random() -> io::Result<Token> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// That of the environment, or a random one.
    pub fn find() -> Result<Token, String> {
        match std::env::var(VARIABLE) {
            Ok(text) => Token::of(&text),
            Err(_) => Token::random().map_err(|error| format!("/dev/urandom: {error}")),
        }
    }

    fn of(text: &str) -> Result<Token, String> {
        let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        if plain && text.len() >= SHORTEST {
            return Ok(Token(text.to_string()));
        }
        Err(format!("{VARIABLE}: must be {SHORTEST} or more letters, digits, - or _"))
    }

    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns whether a word is the token; takes as long however much of it is right.
    pub fn is(&self, word: &str) -> bool {
        let (own, word) = (self.0.as_bytes(), word.as_bytes());
        let differ = own.iter().zip(word).fold(0, |differ, (a, b)| differ | (a ^ b));
        own.len() == word.len() && differ == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_random_and_known_by_all_their_letters() {
        let (one, other) = (Token::random().unwrap(), Token::random().unwrap());
        assert!(one != other && one.text().len() == 32);
        assert!(one.is(one.text()) && !one.is(other.text()) && !one.is("") && !one.is(&one.text()[1..]));
        assert!(!one.is(&format!("{}0", one.text())));
        assert!(Token::of("a-stable_token-16").is_ok());
        for bad in ["", "short", "sixteen letters!", "../../../../etc/passwd"] {
            assert!(Token::of(bad).is_err_and(|why| why.starts_with(VARIABLE)), "{bad}");
        }
    }
}
