#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/engine/bench_checkpoint.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"

namespace tandem::cli {
namespace {

struct CheckpointBenchArguments {
  CheckpointBench request;
  DeviceOptions devices;
  ResultOutput output;
};

nlohmann::ordered_json to_json(const CheckpointBench& q, const CheckpointBenchResult& r,
                               const Communicator& comm) {
  nlohmann::ordered_json us, spread, rates;
  const auto add = [&](const char* name, const BenchTimes& times) {
    us[name] = round_to(times.median_us, 1);
    spread[name] = {round_to(times.min_us, 1), round_to(times.max_us, 1)};
    rates[name] = round_to(r.rate(times, q.ranks), 1e3);
  };
  add("blocked", r.blocked);
  add("copied", r.copied);
  add("saved", r.saved);
  add("loaded", r.loaded);
  add("verified", r.verified);
  add("disk_write", r.disk_write);
  add("disk_read", r.disk_read);
  nlohmann::ordered_json json{
      {"op", "checkpoint"},  {"ranks", q.ranks},           {"transport", comm.transport()},
      {"bytes", r.bytes},    {"parameters", r.parameters}, {"time_us", us},
      {"spread_us", spread}, {"gb_per_s_per_rank", rates}, {"repeats", q.repeats}};
  json.update(origin_json(comm));
  return json;
}

std::string to_text(const CheckpointBench& q, const CheckpointBenchResult& r) {
  std::string text = fmt::format(
      "checkpoint of {:.3f} GB ({} parameters), ranks: {}; median of {}\n"
      "  training waits {:.1f} ms for the snapshot, an update until {:.1f} ms after its begin\n",
      double(r.bytes) * 1e-9, r.parameters, q.ranks, q.repeats, r.blocked.median_us * 1e-3,
      r.copied.median_us * 1e-3);
  const auto row = [&](const char* name, const BenchTimes& times) {
    text += fmt::format("  {:<28} {:>9.3f} s  {:>8.3f} GB/s a rank\n", name, times.median_us * 1e-6,
                        r.rate(times, q.ranks));
  };
  row("saved and verified", r.saved);
  row("raw writes and fsync", r.disk_write);
  row("loaded from page cache", r.loaded);
  row("verified before a load", r.verified);
  row("raw reads from page cache", r.disk_read);
  return text + fmt::format("  saved at {:.0f} % of the disk's rate\n",
                            100 * r.disk_write.median_us / r.saved.median_us);
}

void bench(const CheckpointBenchArguments& arguments, Communicator& comm) {
  const CheckpointBench& q = arguments.request;
  const CheckpointBenchResult result = run_checkpoint_bench(comm, q);
  if (comm.rank() != 0) return;
  arguments.output.write(to_text(q, result), to_json(q, result, comm));
}

void run(CheckpointBenchArguments arguments) {
  const CheckpointBench& q = arguments.request;
  WorldOptions world;
  world.ranks = q.ranks;
  const auto check_gpus = [&] {
    constexpr double kBytes = 18;  // of a weight, its gradient and moments, and its form in bf16
    return kBytes * double(checkpoint_bench_config(q, true).model.parameters());
  };
  set_devices(arguments.devices, world, {"", check_gpus});
  arguments.output.check();
  run_ranks(arguments.devices, world, [&](Communicator& comm) { bench(arguments, comm); });
}

}  // namespace

void add_bench_checkpoint(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "checkpoint", "Time checkpoints of a given size, next to the disk's own rate");
  auto arguments = std::make_shared<CheckpointBenchArguments>();
  CheckpointBench& request = arguments->request;
  command
      ->add_option("folder", request.folder,
                   "New folder on the disk to measure; it is removed afterwards")
      ->required();
  command->add_option("--size", request.gigabytes, "GB of a checkpoint, of all ranks together")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e5));
  command->add_option("--ranks", request.ranks, "Data-parallel ranks, which divide the state")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  add_device_options(*command, arguments->devices);
  command->add_option("--repeats", request.repeats, "Checkpoints; medians are reported")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  add_json_option(*command, arguments->output, "the result", "it");
  command->footer(
      "\nExample:\n"
      "  tandem bench checkpoint out/rates --size 0.05 --ranks 2 --device cpu\n"
      "\nA model of that size, its moments and a run's own code: a snapshot, for which training\n"
      "waits, then files that are written, verified, synced and renamed in the background. Each "
      "is\n"
      "loaded over another state and compared bit for bit. The ranks also write and sync, and "
      "read\n"
      "back, as many bytes in files of their own. Exit code 1: a state differed.");
  command->callback([arguments] {
    now_doing("bench checkpoint");
    run(*arguments);
  });
}

}  // namespace tandem::cli
