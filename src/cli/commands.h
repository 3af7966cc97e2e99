// Subcommands. Each is one file that adds itself to the program; its callback does the work and
// throws tandem::Error for all user errors.
#pragma once

#include <CLI/CLI.hpp>

namespace tandem::cli {

void add_train(CLI::App& app);
/// Prints the keys of the table in `tandem train --help TABLE`; false for other command lines.
/// Throws InvalidArgument for an unknown table.
bool print_key_help(int argc, const char* const* argv);
void add_finetune(CLI::App& app);
void add_eval(CLI::App& app);
/// `tandem data`
void add_data(CLI::App& app);
/// `tandem data check`
void add_data_check(CLI::App& data);
/// `tandem data index` and `tandem data verify`
void add_data_index(CLI::App& data);
void add_fit(CLI::App& app);
void add_generate(CLI::App& app);
void add_bench(CLI::App& app);
/// `tandem bench attention`
void add_bench_attention(CLI::App& bench);
/// `tandem bench paged`
void add_bench_paged(CLI::App& bench);
/// `tandem bench train`
void add_bench_train(CLI::App& bench);
/// `tandem bench generate`
void add_bench_generate(CLI::App& bench);
/// `tandem bench gemm`
void add_bench_gemm(CLI::App& bench);
/// `tandem bench serve`
void add_bench_serve(CLI::App& bench);
/// `tandem bench checkpoint`
void add_bench_checkpoint(CLI::App& bench);
/// `tandem check-layout`
void add_check_layout(CLI::App& app);
/// `tandem bench pipeline`
void add_bench_pipeline(CLI::App& bench);
void add_completion(CLI::App& app);
void add_doctor(CLI::App& app);
void add_info(CLI::App& app);
void add_launch(CLI::App& app);
void add_plan(CLI::App& app);
/// `tandem plan placements`
void add_plan_placements(CLI::App& plan);
/// `tandem plan --fit`
void add_plan_fit(CLI::App& plan);
void add_report(CLI::App& app);
void add_serve(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_trace(CLI::App& app);
void add_tune(CLI::App& app);

}  // namespace tandem::cli
