#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/bench_paged.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PagedBenchArguments {
  PagedBench request;
  int ranks = 1;
  DeviceOptions devices;
  std::string dtype = "bf16";
  ResultOutput output;
};

/// GB/s of keys and values of a rank.
double rate(const PagedBench& q, const BenchTimes& times) {
  return q.bytes() / times.median_us * 1e-3;
}

Json to_json(const PagedBench& q, const PagedBenchResult& r, const Communicator& comm) {
  Json candidates = Json::object(), rates = Json::object();
  for (const auto& [name, times] : r.forms) {
    candidates[name] = {{"median", round_to(times.median_us, 100)},
                        {"min", round_to(times.min_us, 100)},
                        {"max", round_to(times.max_us, 100)}};
    rates[name] = round_to(rate(q, times), 10);
  }
  Json json{{"op", "paged_attention"},
            {"transport", comm.transport()},
            {"ranks", comm.size()},
            {"rows", q.rows},
            {"tokens", q.tokens},
            {"heads", q.heads},
            {"kv_heads", q.kv_heads},
            {"head_dim", q.head_dim},
            {"window", q.window},
            {"dtype", name_of(q.dtype)},
            {"batch_invariant", q.batch_invariant},
            {"bytes", q.bytes()},
            {"config",
             {{"threads_per_rank", kernel_threads()},
              {"refused", r.refusals},
              {"candidates_us", candidates}}},
            {"gb_per_s", rates},
            {"repeats", q.repeats},
            {"error", {{"max_of_bound", r.of_bound}, {"bound", 1}}},
            {"bitwise_equal_runs", r.same_bits}};
  json.update(origin_json(comm));
  return json;
}

std::string table(const PagedBench& q, const PagedBenchResult& r) {
  std::string text = fmt::format(
      "{} rows of {} tokens, {} heads, {} key heads of {}, {}: {:.1f} MB of keys and values\n"
      "{:<10} {:>10} {:>10} {:>10} {:>10}\n",
      q.rows, q.tokens, q.heads, q.kv_heads, q.head_dim, name_of(q.dtype), q.bytes() * 1e-6, "form",
      "us", "min", "max", "GB/s");
  for (const PagedBenchForm& form : paged_bench_forms()) {
    const auto found = r.forms.find(form.name);
    if (found == r.forms.end()) continue;
    const BenchTimes& times = found->second;
    text += fmt::format("{:<10} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.1f}\n", form.name,
                        times.median_us, times.min_us, times.max_us, rate(q, times));
  }
  for (const auto& [reason, names] : r.refusals) {
    text += fmt::format("not run: {}: {}\n", fmt::join(names, ", "), reason);
  }
  return text;
}

void bench(const PagedBenchArguments& arguments, Communicator& comm) {
  const PagedBenchResult result = run_paged_bench(comm, arguments.request);
  if (comm.rank() == 0) {
    arguments.output.write(table(arguments.request, result),
                           to_json(arguments.request, result, comm));
  }
  if (!result.ok()) {
    throw Error(
        "bench paged: a result differs from the reference by more than the bound, or between "
        "runs");
  }
}

void run(PagedBenchArguments& arguments) {
  PagedBench& q = arguments.request;
  q.dtype = arguments.dtype == "f32" ? DType::f32 : DType::bf16;
  WorldOptions world;
  world.ranks = arguments.ranks;
  set_devices(arguments.devices, world);
  arguments.output.check();
  run_ranks(arguments.devices, world, [&](Communicator& comm) { bench(arguments, comm); });
}

void add_shape(CLI::App& command, PagedBench& request) {
  const CLI::Range extent(int64_t{1}, int64_t{1} << 20);
  const auto size = [&](const char* name, int64_t& value, const char* help) {
    command.add_option(name, value, help)->capture_default_str()->check(extent);
  };
  size("--rows", request.rows, "Texts, each with a row of the step");
  size("--tokens", request.tokens, "Tokens of each text, with the row's");
  size("--heads", request.heads, "Query heads");
  size("--kv-heads", request.kv_heads, "Key and value heads");
  size("--head-dim", request.head_dim, "Features of a head");
  command.add_option("--window", request.window, "Keys that a query reads; 0: all")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
}

}  // namespace

void add_bench_paged(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "paged", "Time attention of a decode step over keys and values in pages");
  auto arguments = std::make_shared<PagedBenchArguments>();
  PagedBench& request = arguments->request;
  add_shape(*command, request);
  command->add_option("--dtype", arguments->dtype, "Data type of queries, keys and values")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_flag("--batch-invariant", request.batch_invariant,
                    "A row's bits do not depend on the number of rows");
  std::vector<std::string> names;
  for (const PagedBenchForm& form : paged_bench_forms()) names.emplace_back(form.name);
  command->add_option("--forms", request.forms, "Forms to time (default: all that the device has)")
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  command->add_option("--ranks", arguments->ranks, "Ranks, each with a step of its own")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  add_device_options(*command, arguments->devices);
  command->add_option("--repeats", request.repeats, "Timed rounds")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  add_json_option(*command, arguments->output, "the result", "it");
  std::string forms = "\nForms, the last seven on Hopper GPUs only:\n";
  for (const PagedBenchForm& form : paged_bench_forms()) {
    forms += fmt::format("  {:<10} {}\n", form.name, form.text);
  }
  command->footer(
      "\nExamples:\n"
      "  tandem bench paged --rows 4 --tokens 2080\n"
      "  tandem bench paged --rows 1 --tokens 500 --heads 8 --kv-heads 2 --head-dim 64 --device "
      "cpu\n" +
      forms +
      "Exit code 1: a form's result differs from attention in double by more than its roundings, "
      "or\nbetween runs.");
  command->callback([arguments] {
    now_doing("bench paged");
    run(*arguments);
  });
}

}  // namespace tandem::cli
