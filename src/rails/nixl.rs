//! Where NVIDIA's NIXL lies, if anywhere. Found here, opened by who moves rows.
//!
//! It is opened by its path and by nothing else, so that it is known which one runs. The wheels `nixl_cu12` and `nixl_cu13` hold it in a folder of their own beside the package, in the
//! environment that vLLM runs in; NVIDIA's own builds install below `/opt` and `/usr/local`.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

const LIBRARY: &str = "libnixl_capi.so";

/// Folders of installations, each with one folder per architecture below.
const INSTALLED: [&str; 2] = ["opt/nvidia/nvda_nixl/lib", "usr/local/nixl/lib"];

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nixl {
    /// The C library. None: there is none.
    pub library: Option<PathBuf>,
    /// Of the wheel it came with.
    pub version: Option<String>,
    /// Folders that were looked into.
    pub looked_in: Vec<PathBuf>,
}

impl Nixl {
    /// Looks into the virtual environments given, then where it is installed below `root`.
    pub fn find(root: &Path, environments: &[PathBuf]) -> Self {
        let mut found = Self::default();
        for packages in environments.iter().flat_map(|venv| site_packages(venv)) {
            found.looked_in.push(packages.clone());
            let wheel = entries(&packages)
                .into_iter()
                .find(|entry| name(entry).contains("nixl") && entry.join(LIBRARY).is_file());
            if let Some(wheel) = wheel {
                let version =
                    entries(&packages).iter().find_map(|entry| version(&name(entry), &name(&wheel)));
                return Self { library: Some(wheel.join(LIBRARY)), version, ..found };
            }
        }
        for folder in INSTALLED.map(|folder| root.join(folder)) {
            found.looked_in.push(folder.clone());
            let below = entries(&folder).into_iter().chain([folder]);
            if let Some(library) = below.map(|at| at.join(LIBRARY)).find(|library| library.is_file()) {
                return Self { library: Some(library), ..found };
            }
        }
        found
    }
}

fn site_packages(venv: &Path) -> Vec<PathBuf> {
    let pythons = entries(&venv.join("lib"));
    pythons.into_iter().map(|python| python.join("site-packages")).filter(|at| at.is_dir()).collect()
}

/// The version in `nixl_cu13-1.5.1.dist-info`, when it is of the wheel that `folder` belongs to.
fn version(entry: &str, folder: &str) -> Option<String> {
    let (package, version) = entry.strip_suffix(".dist-info")?.split_once('-')?;
    (folder.contains(package) && package.starts_with("nixl")).then(|| version.to_owned())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_wheel_in_the_environment_comes_first_and_absence_names_where_it_was_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (root, venv) = (dir.path().join("root"), dir.path().join("venv"));
        let packages = venv.join("lib/python3.12/site-packages");
        fs::create_dir_all(packages.join("nixl_cu12-1.5.1.dist-info")).unwrap();
        fs::create_dir_all(packages.join("nixl_cu13-1.4.0.dist-info")).unwrap();
        let absent = Nixl::find(&root, std::slice::from_ref(&venv));
        assert_eq!((absent.library.as_ref(), absent.looked_in.len()), (None, 3));
        assert!(absent.looked_in.contains(&packages));

        let installed = root.join("opt/nvidia/nvda_nixl/lib/aarch64-linux-gnu");
        fs::create_dir_all(&installed).unwrap();
        fs::write(installed.join(LIBRARY), "").unwrap();
        let found = Nixl::find(&root, std::slice::from_ref(&venv));
        assert_eq!((found.library, found.version), (Some(installed.join(LIBRARY)), None));

        let wheel = packages.join(".nixl_cu12.mesonpy.libs");
        fs::create_dir_all(&wheel).unwrap();
        fs::write(wheel.join(LIBRARY), "").unwrap();
        let found = Nixl::find(&root, &[venv]);
        assert_eq!((found.library, found.version.as_deref()), (Some(wheel.join(LIBRARY)), Some("1.5.1")));
    }
}
