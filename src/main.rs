//! Parses, hands to `cli`, turns the outcome into an exit code.

fn main() -> std::process::ExitCode {
    spark_kv::cli::main(std::env::args_os()).into()
}
