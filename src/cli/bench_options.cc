#include "cli/bench_options.h"

#include "core/machine.h"

namespace tandem::cli {

void declare(CLI::App& command, BenchOptions& options) {
  const CLI::Range extent(int64_t{1}, int64_t{1} << 40);
  command.add_option("op", options.request.op, "What to time")
      ->required()
      ->check(CLI::IsMember(bench_ops()));
  command.add_option("--ranks", options.ranks, "Ranks (threads; under mpirun its own count)")
      ->check(CLI::Range(1, 4096));
  command.add_option("--m", options.m, "Tokens over all ranks; several values: one run each")
      ->capture_default_str()
      ->check(extent);
  options.request.n = options.request.k = 1024;
  command.add_option("--n", options.request.n, "Output features over all ranks")
      ->capture_default_str()
      ->check(extent);
  command.add_option("--k", options.request.k, "Input features over all ranks")
      ->capture_default_str()
      ->check(extent);
  command.add_option("--dtype", options.dtype, "f32 or bf16")->capture_default_str();
  command.add_option("--link", options.link,
                     "Emulate a link between thread ranks, e.g. 1GB/s,20us");
  command.add_option("--link-label", options.link_label,
                     "What to call the real link in the result, e.g. \"tbf 1gbit\"");
  command
      .add_option("--chunks", options.request.chunks,
                  "Transfers per shard (0: the fastest of 1, 2, 4, 8)")
      ->capture_default_str()
      ->check(CLI::Range(0, 16));
  command.add_option("--repeats", options.request.repeats, "Timed rounds")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  command.add_option("--json", options.json, "Write the result to this file (-: print only it)");
  command.footer(
      "\nExamples:\n"
      "  tandem bench gemm_rs --ranks 2 --m 2048 --n 2048 --k 2048 --link 150MB/s,20us\n"
      "  tandem bench ag_gemm --m 512 1024 2048 --dtype bf16 --json result.json\n"
      "  mpirun -n 4 tandem bench all_reduce --m 4096 --n 1024     beside MPI_Allreduce\n"
      "\nA plain collective moves an m x n matrix. Exit code 1: a result was wrong.");
}

BenchJob job_of(const BenchOptions& options) {
  BenchJob job;
  job.world.ranks = options.ranks ? options.ranks : launched_by_mpi() ? 1 : 2;
  if (!options.link.empty()) job.world.link = EmulatedLink::parse(options.link);
  BenchRequest request = options.request;
  request.dtype = parse_dtype(options.dtype);
  for (const int64_t m : options.m) {
    request.m = m;
    if (!launched_by_mpi()) check_bench(request, job.world.ranks);  // there the world says how many
    job.requests.push_back(request);
  }
  return job;
}

}  // namespace tandem::cli
