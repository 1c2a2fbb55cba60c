//! Numbers of 8 bits: what the bits of E4M3 and E5M2 mean, for every executor alike.
//!
//! E4M3 has no infinity, so that its largest number is 448; E5M2 is laid out as IEEE's formats are. Both are as the OCP's "8-bit
//! Floating Point Specification" has them, and as PyTorch's `float8_e4m3fn` and `float8_e5m2` are.

use crate::types::DType;

/// One of the two formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Bits of the mantissa.
    mantissa: u32,
    /// Exponent of the smallest normal number.
    least: i32,
    /// Bits of the largest number.
    largest: u8,
}

impl Format {
    /// Four bits of exponent, three of mantissa.
    pub const E4M3: Format = Format { mantissa: 3, least: -6, largest: 0x7e };
    /// Five bits of exponent, two of mantissa.
    pub const E5M2: Format = Format { mantissa: 2, least: -14, largest: 0x7b };

    /// Format of an element type of 8 bits.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::E4M3 => Some(Format::E4M3),
            DType::E5M2 => Some(Format::E5M2),
            DType::F64 | DType::F32 | DType::Bf16 | DType::F16 | DType::I32 | DType::U8 => None,
        }
    }

    /// The largest number.
    pub fn largest(self) -> f64 {
        self.decode(self.largest)
    }

    /// The number of some bits.
    pub fn decode(self, bits: u8) -> f64 {
        let (code, sign) = (bits & 0x7f, if bits & 0x80 == 0 { 1.0 } else { -1.0 });
        let (exponent, mantissa) = (i32::from(code >> self.mantissa), f64::from(code & self.last_mantissa()));
        let whole = f64::from(1 << self.mantissa);
        sign * match code {
            // What lies beyond the largest number: infinity, if there is one, then NaN.
            0x7c if self == Format::E5M2 => f64::INFINITY,
            beyond if beyond > self.largest => f64::NAN,
            _ if exponent == 0 => power(self.least) * (mantissa / whole),
            _ => power(self.least + exponent - 1) * (1.0 + mantissa / whole),
        }
    }

    /// The nearest number, ties to even; beyond the largest, that. NaN stays NaN.
    pub fn encode(self, x: f64) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return sign | 0x7f;
        }
        let size = x.abs().min(self.largest());
        // That of the numbers about as large; below the smallest normal number they lie as close as there.
        let exponent = ((size.to_bits() >> 52) as i32 - 1023).max(self.least);
        let steps = (size / power(exponent - self.mantissa as i32)).round_ties_even() as u8;
        // A mantissa that is rounded up to the next power of two is that, as the bits lie.
        sign | ((((exponent - self.least) as u8) << self.mantissa) + steps)
    }

    fn last_mantissa(self) -> u8 {
        (1 << self.mantissa) - 1
    }
}

fn power(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [Format; 2] = [Format::E4M3, Format::E5M2];

    #[test]
    fn known_numbers_have_their_bits() {
        let known = [
            (0.0, 0x00),
            (1.0, 0x38),
            (-1.0, 0xb8),
            (448.0, 0x7e),
            (2f64.powi(-9), 0x01),
            (0.875 * 2f64.powi(-6), 0x07),
        ];
        for (x, bits) in known {
            assert_eq!((Format::E4M3.encode(x), Format::E4M3.decode(bits)), (bits, x));
        }
        let known = [(0.0, 0x00), (1.0, 0x3c), (-1.5, 0xbe), (57344.0, 0x7b), (2f64.powi(-16), 0x01)];
        for (x, bits) in known {
            assert_eq!((Format::E5M2.encode(x), Format::E5M2.decode(bits)), (bits, x));
        }
        assert!(Format::E5M2.decode(0x7c) == f64::INFINITY && Format::E5M2.decode(0xfc) == f64::NEG_INFINITY);
    }

    #[test]
    fn every_number_stays_what_it_is() {
        for format in BOTH {
            for bits in (0..=u8::MAX).filter(|bits| format.decode(*bits).is_finite()) {
                assert_eq!(format.encode(format.decode(bits)), bits, "{format:?}");
            }
            let infinite = if format == Format::E5M2 { 2 } else { 0 };
            let finite = (0..=u8::MAX).filter(|bits| format.decode(*bits).is_finite()).count();
            let nan = (0..=u8::MAX).filter(|bits| format.decode(*bits).is_nan()).count();
            assert_eq!(finite + nan + infinite, 256);
        }
    }

    /// Against a search among all numbers.
    #[test]
    fn the_nearest_number_is_found_and_ties_go_to_even() {
        for format in BOTH {
            let all: Vec<(u8, f64)> =
                (0..0x80).map(|bits| (bits, format.decode(bits))).filter(|(_, x)| x.is_finite()).collect();
            let nearest = |x: f64| {
                let distance = |other: f64| (x - other).abs();
                let key = |a: &&(u8, f64), b: &&(u8, f64)| {
                    distance(a.1).total_cmp(&distance(b.1)).then((a.0 % 2).cmp(&(b.0 % 2)))
                };
                all.iter().min_by(key).unwrap().0
            };
            let between = all.windows(2).flat_map(|pair| {
                let (a, b) = (pair[0].1, pair[1].1);
                [0.01, 0.49999, 0.5, 0.50001, 0.99].map(|share| a + share * (b - a))
            });
            for x in between.chain([1e-12, 1e6, 1e300, f64::INFINITY]) {
                assert_eq!(format.encode(x), nearest(x.min(format.largest())), "{x:e} as {format:?}");
                assert_eq!(format.encode(-x), nearest(x.min(format.largest())) | 0x80);
            }
        }
    }

    #[test]
    fn nan_stays_nan() {
        for format in BOTH {
            assert!(format.decode(format.encode(f64::NAN)).is_nan());
        }
    }
}
