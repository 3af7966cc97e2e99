#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/bench_gemm.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct GemmBenchArguments {
  GemmBench request;
  DeviceOptions devices;
  std::string dtype;
  ResultOutput output;
};

nlohmann::ordered_json to_json(const GemmBench& q, const GemmBenchResult& r,
                               const Communicator& comm) {
  nlohmann::ordered_json runs = nlohmann::ordered_json::array();
  for (const GemmBenchRow& row : r.rows) {
    runs.push_back(
        {{"weights", row.weights},
         {"m", row.rows},
         {"bytes", row.bytes},
         {"time_us", {{"gemm", round_to(row.times.median_us, 100)}}},
         {"spread_us",
          {{"gemm", {round_to(row.times.min_us, 100), round_to(row.times.max_us, 100)}}}},
         {"gb_per_s", round_to(row.gb_per_s(), 100)},
         {"error", {{"max_of_bound", row.error}, {"bound", 1}}}});
  }
  nlohmann::ordered_json json{{"op", "gemm"},
                              {"transport", comm.transport()},
                              {"ranks", 1},
                              {"n", q.n},
                              {"k", q.k},
                              {"dtype", name_of(q.dtype)},
                              {"copy_gb_per_s", round_to(r.copy_gb_per_s(), 100)},
                              {"runs", runs}};
  json.update(origin_json(comm));
  return json;
}

std::string table(const GemmBenchResult& r) {
  std::string text = fmt::format("{:<8} {:>5} {:>12} {:>10} {:>10} {:>10}\n", "weights", "rows",
                                 "us", "min", "GB/s", "% of copy");
  for (const GemmBenchRow& row : r.rows) {
    text += fmt::format("{:<8} {:>5} {:>12.2f} {:>10.2f} {:>10.1f} {:>10.1f}\n", row.weights,
                        row.rows, row.times.median_us, row.times.min_us, row.gb_per_s(),
                        100 * row.gb_per_s() / r.copy_gb_per_s());
  }
  return text + fmt::format("a copy reads and writes {:.1f} GB/s\n", r.copy_gb_per_s());
}

void bench(const GemmBenchArguments& arguments, Communicator& comm) {
  const GemmBenchResult result = run_gemm_bench(comm, arguments.request);
  arguments.output.write(table(result), to_json(arguments.request, result, comm));
  if (!result.ok()) throw Error("bench gemm: a product differs from its reference");
}

void run(GemmBenchArguments arguments) {
  WorldOptions world;
  world.ranks = 1;
  set_devices(arguments.devices, world);
  const bool on_gpus = arguments.devices.on_gpus();
  arguments.request.dtype = parse_dtype(!arguments.dtype.empty() ? arguments.dtype
                                        : on_gpus                ? "bf16"
                                                                 : "f32");
  arguments.output.check();
  run_ranks(arguments.devices, world, [&](Communicator& comm) { bench(arguments, comm); });
}

}  // namespace

void add_bench_gemm(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "gemm", "Time GEMMs of few rows, as in decode, by the form of their weight");
  auto arguments = std::make_shared<GemmBenchArguments>();
  GemmBench& request = arguments->request;
  const CLI::Range extent(int64_t{8}, int64_t{1} << 20);
  command->add_option("--n", request.n, "Output features")->capture_default_str()->check(extent);
  command->add_option("--k", request.k, "Input features, a multiple of 8 on GPUs")
      ->capture_default_str()
      ->check(extent);
  command->add_option("--rows", request.rows, "Rows of x, up to 64")
      ->capture_default_str()
      ->delimiter(',');
  command->add_option("--weights", request.weights, "Codes of the weight; none: as --dtype")
      ->capture_default_str()
      ->delimiter(',')
      ->check(CLI::IsMember(weight_format_names()));
  command
      ->add_option("--dtype", arguments->dtype,
                   "Data type of x and uncoded weights (default: f32 on CPUs, bf16 on GPUs)")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_device_options(*command, arguments->devices);
  add_json_option(*command, arguments->output, "the result", "it");
  command->footer(
      "\nExamples:\n"
      "  tandem bench gemm --n 512 --k 512 --rows 1,8 --weights none,int8,e4m3\n");
  command->callback([arguments] {
    now_doing("bench gemm");
    run(*arguments);
  });
}

}  // namespace tandem::cli
