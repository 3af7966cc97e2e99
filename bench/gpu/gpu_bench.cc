// tandem_gpu_bench RANKS REPEATS FILE CASE...: times operators on GPUs. A CASE is OP:MxNxK, sizes
// over all ranks (ag_gemm:8192x57344x8192), or all_reduce:BYTES.
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/gpu/bench_case.h"

namespace {

using namespace tandem;
using namespace tandem::gpu;

Case parse(const std::string& text) {
  const size_t colon = text.find(':');
  Case c{text.substr(0, colon), 0, 0, 0};
  long long m = 0, n = 0, k = 0;
  const std::string sizes = colon == std::string::npos ? "" : text.substr(colon + 1);
  if (c.op == "all_reduce" && std::sscanf(sizes.c_str(), "%lld", &m) == 1 && m >= 16) {
    c.m = 1;
    c.n = m / int64_t(size_of(c.dtype));
    return c;
  }
  if (std::sscanf(sizes.c_str(), "%lldx%lldx%lld", &m, &n, &k) != 3) {
    throw InvalidArgument("case " + text + ": expected OP:MxNxK or all_reduce:BYTES");
  }
  c.m = m;
  c.n = n;
  c.k = k;
  return c;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 5) throw InvalidArgument("usage: tandem_gpu_bench RANKS REPEATS FILE CASE...");
  std::vector<Case> cases;
  for (int i = 4; i < argc; ++i) cases.push_back(parse(argv[i]));
  const int ranks = std::stoi(argv[1]);
  const MeasureOptions options{.repeats = std::stoi(argv[2])};
  bool correct = true;
  run_gpus({ranks, {}, 0}, [&](Communicator& any) {
    NcclCommunicator& comm = as_nccl(any);
    const LtContext lt;
    Stopwatch stopwatch(comm);
    nlohmann::json results = nlohmann::json::array();
    for (const Case& c : cases) {
      const Result result = run_case(comm, lt, stopwatch, c, options);
      if (comm.rank() != 0) continue;
      correct = correct && result.correct();
      fmt::print("{}\n", describe(result));
      std::fflush(stdout);
      results.push_back(to_json(result, fmt::format("tandem_gpu_bench {} {} FILE {}", argv[1],
                                                    argv[2], argv[4 + (&c - cases.data())])));
      std::ofstream(argv[3]) << results.dump(1) << "\n";
    }
  });
  return correct ? 0 : 1;
} catch (const tandem::Error& error) {
  fmt::print(stderr, "tandem_gpu_bench: error: {}\n", error.what());
  return error.exit_code();
} catch (const std::exception& error) {
  fmt::print(stderr, "tandem_gpu_bench: error: {}\n", error.what());
  return 70;
}
