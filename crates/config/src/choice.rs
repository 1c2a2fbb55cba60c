//! Settings that are one of a few words.

/// An enum whose variants are words: typed on the command line, printed, and kept in `config.json`.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$about])* #[serde(rename = $word)] $variant),+
        }

        impl $name {
            pub const WORDS: &'static [&'static str] = &[$($word),+];
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $($name::$variant => $word),+ })
            }
        }

        impl crate::settings::value::Value for $name {
            const WORDS: &'static [&'static str] = $name::WORDS;

            fn read(text: &str) -> Result<Self, String> {
                text.parse()
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(word: &str) -> Result<Self, String> {
                match word {
                    $($word => Ok($name::$variant),)+
                    _ => Err(crate::settings::value::none_of(word, Self::WORDS)),
                }
            }
        }
    };
}

pub(crate) use choice;

choice! {
    /// Device that computes.
    #[derive(Default)]
    Device {
        #[default]
        Cpu = "cpu",
        Cuda = "cuda",
    }
}

choice! {
    /// Number format that matmuls are computed in.
    #[derive(Default)]
    Precision {
        #[default]
        Fp32 = "fp32",
        Tf32 = "tf32",
        Bf16 = "bf16",
        Fp16 = "fp16",
        /// For checking: twice the memory, half the speed.
        Fp64 = "fp64",
    }
}

choice! {
    /// Form of the learning-rate schedule.
    #[derive(Default)]
    Form {
        #[default]
        Cosine = "cosine",
        Linear = "linear",
        Step = "step",
        Poly = "poly",
        Constant = "constant",
    }
}
