//! The random numbers of the reference generator, reproduced: xoshiro256++ seeded by PCG32 steps,
//! and the rejection sampling of the `rand` 0.8 family for each integer width it uses.
//!
//! Sources: Blackman and Vigna, "Scrambled linear pseudorandom number generators" (2021); O'Neill,
//! "PCG" (2014); Lemire, "Fast random integer generation in an interval" (2019).

#[derive(Clone, Debug)]
pub struct Rng {
    s: [u64; 4],
}

impl Rng {
    /// Expands a 64-bit seed to the 256-bit state, four bytes a PCG32 step.
    #[inline]
    pub fn seeded(seed: u64) -> Rng {
        const MUL: u64 = 6_364_136_223_846_793_005;
        const INC: u64 = 11_634_580_027_462_260_723;
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(MUL).wrapping_add(INC);
            let xorshifted = (((state >> 18) ^ state) >> 27) as u32;
            u64::from(xorshifted.rotate_right((state >> 59) as u32))
        };
        let mut word = || {
            let low = next();
            low | (next() << 32)
        };
        Rng { s: [word(), word(), word(), word()] }
    }

    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.s;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    #[inline]
    pub fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// A 64-bit number below `range` (> 0).
    #[inline]
    pub fn below(&mut self, range: u64) -> u64 {
        let zone = (range << range.leading_zeros()).wrapping_sub(1);
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(range);
            if wide as u64 <= zone {
                return (wide >> 64) as u64;
            }
        }
    }

    /// A 32-bit number below `range` (> 0).
    #[inline]
    pub fn below_u32(&mut self, range: u32) -> u32 {
        let zone = (range << range.leading_zeros()).wrapping_sub(1);
        loop {
            let wide = u64::from(self.next_u32()) * u64::from(range);
            if wide as u32 <= zone {
                return (wide >> 32) as u32;
            }
        }
    }

    /// One of the 26 lower-case letters.
    #[inline]
    pub fn letter(&mut self) -> u8 {
        const RANGE: u32 = 26;
        // Eight-bit samples take the exact zone: the largest multiple of the range.
        const ZONE: u32 = u32::MAX - (u32::MAX - RANGE + 1) % RANGE;
        loop {
            let wide = u64::from(self.next_u32()) * u64::from(RANGE);
            if wide as u32 <= ZONE {
                return b'a' + (wide >> 32) as u8;
            }
        }
    }

    /// Appends `n` letters.
    #[inline]
    pub fn letters(&mut self, n: usize, out: &mut Vec<u8>) {
        out.extend((0..n).map(|_| self.letter()));
    }

    /// Draws `n` letters and forgets them.
    #[inline]
    pub fn skip_letters(&mut self, n: usize) {
        for _ in 0..n {
            self.letter();
        }
    }

    /// A uniform float in [0, 1) with 24 bits.
    #[inline]
    pub fn unit_f32(&mut self) -> f32 {
        (1.0 / 16_777_216.0) * (self.next_u32() >> 8) as f32
    }
}
