//! Tells the versions of the rivals, as Cargo.lock has them.

fn main() {
    println!("cargo:rerun-if-changed=Cargo.lock");
    let lock = std::fs::read_to_string("Cargo.lock").expect("cargo has written it");
    for name in ["contend", "rslock", "redlock", "distributed-lock-redis"] {
        let version = lock
            .split("[[package]]")
            .find(|package| package.contains(&format!("\nname = \"{name}\"\n")))
            .and_then(|package| package.split("version = \"").nth(1)?.split('"').next())
            .unwrap_or("?");
        let key = name.to_uppercase().replace('-', "_");
        println!("cargo:rustc-env=VERSION_OF_{key}={version}");
    }
}
