//! What a GPU's own sensors say, through NVML: load, memory, temperature, power.
//!
//! A thread of its own asks twice a second; a step takes what it last heard, and waits for nothing.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use serde::Serialize;
use std::ffi::OsString;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The variable that names NVML's file.
const VARIABLE: &str = "VITESSE_NVML";
const LIBRARY: &str = "libnvidia-ml.so.1";

const EVERY: Duration = Duration::from_millis(500);

/// NaN for what a GPU doesn't tell.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sensors {
    /// The part of the last moments in which something ran, 0 to 1.
    pub load: f64,
    /// Bytes, of all programs.
    pub memory_used: f64,
    pub memory_free: f64,
    pub memory_total: f64,
    /// Degrees Celsius.
    pub temperature: f64,
    /// Watts.
    pub power: f64,
}

impl Sensors {
    pub const COUNT: usize = 6;

    pub fn unknown() -> Self {
        Self::from_numbers(&[f64::NAN; Self::COUNT])
    }

    /// Returns whether anything is known.
    pub fn is_known(&self) -> bool {
        self.numbers().iter().any(|x| x.is_finite())
    }

    pub fn numbers(&self) -> [f64; Self::COUNT] {
        let Sensors { load, memory_used, memory_free, memory_total, temperature, power } = *self;
        [load, memory_used, memory_free, memory_total, temperature, power]
    }

    pub fn from_numbers(numbers: &[f64; Self::COUNT]) -> Self {
        let [load, memory_used, memory_free, memory_total, temperature, power] = *numbers;
        Sensors { load, memory_used, memory_free, memory_total, temperature, power }
    }

    /// Of each number the mean over those who tell it.
    pub fn mean(all: &[Sensors]) -> Self {
        let column = |i: usize| {
            let known = all.iter().map(|sensors| sensors.numbers()[i]).filter(|x| x.is_finite());
            let (sum, count) = known.fold((0.0, 0.0), |(sum, count), x| (sum + x, count + 1.0));
            sum / count
        };
        Self::from_numbers(&std::array::from_fn(column))
    }
}

/// NVML, from the file that `VITESSE_NVML` names or where the system has it.
fn library() -> Result<Nvml, String> {
    let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    open(path.unwrap_or_else(|| LIBRARY.into()))
}

fn open(path: OsString) -> Result<Nvml, String> {
    Nvml::builder().lib_path(&path).init().map_err(|error| error.to_string())
}

/// As NVML spells what tells a GPU from all others.
fn spelled(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn look(nvml: &Nvml, uuid: &str) -> Result<Sensors, String> {
    let device = nvml.device_by_uuid(uuid).map_err(|error| error.to_string())?;
    let memory = device.memory_info().ok();
    let bytes = |part: Option<u64>| part.map_or(f64::NAN, |bytes| bytes as f64);
    Ok(Sensors {
        load: device.utilization_rates().map_or(f64::NAN, |rates| f64::from(rates.gpu) / 100.0),
        memory_used: bytes(memory.as_ref().map(|m| m.used)),
        memory_free: bytes(memory.as_ref().map(|m| m.free)),
        memory_total: bytes(memory.as_ref().map(|m| m.total)),
        temperature: device.temperature(TemperatureSensor::Gpu).map_or(f64::NAN, f64::from),
        power: device.power_usage().map_or(f64::NAN, |milliwatts| f64::from(milliwatts) / 1e3),
    })
}

/// What a GPU's sensors say now, or why they say nothing.
pub fn once(uuid: [u8; 16]) -> Result<Sensors, String> {
    look(&library()?, &spelled(uuid))
}

/// Asks again and again until it is dropped.
pub struct Sampler {
    latest: Arc<Mutex<Sensors>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Returns at once: NVML is loaded by the thread too. Where there is none, or it doesn't know the GPU, nothing is ever known.
    pub fn start(uuid: [u8; 16]) -> Self {
        Self::over(library, uuid)
    }

    /// With NVML from this file.
    pub fn from_file(path: impl Into<OsString>, uuid: [u8; 16]) -> Self {
        let path = path.into();
        Self::over(move || open(path), uuid)
    }

    fn over(library: impl FnOnce() -> Result<Nvml, String> + Send + 'static, uuid: [u8; 16]) -> Self {
        let uuid = spelled(uuid);
        let latest = Arc::new(Mutex::new(Sensors::unknown()));
        let (stop, stopped) = channel::<()>();
        let told = Arc::clone(&latest);
        let watch = move || {
            let Ok(nvml) = library() else { return };
            while let Ok(sensors) = look(&nvml, &uuid) {
                // Held for a copy alone, so that no step waits for a sensor.
                *told.lock().unwrap_or_else(PoisonError::into_inner) = sensors;
                if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Sensors::unknown();
        };
        let thread = std::thread::Builder::new().name("vitesse-sensors".into()).spawn(watch).ok();
        Sampler { latest, stop: Some(stop), thread }
    }

    pub fn latest(&self) -> Sensors {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The library must not be in use when the process ends.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_spelled_as_nvml_does() {
        let uuid = std::array::from_fn(|i| i as u8);
        assert_eq!(spelled(uuid), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn means_leave_out_what_is_unknown() {
        let one = Sensors { load: 0.5, power: 100.0, ..Sensors::unknown() };
        let two = Sensors { load: 0.7, ..Sensors::unknown() };
        let mean = Sensors::mean(&[one, two, Sensors::unknown()]);
        assert!((mean.load - 0.6).abs() < 1e-12 && mean.power == 100.0 && mean.temperature.is_nan());
        assert!(mean.is_known() && !Sensors::mean(&[]).is_known());
    }
}
