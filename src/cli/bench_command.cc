#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "bench/bench_moe.h"
#include "bench/bench_options.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/output.h"
#include "tandem/cuda.h"

namespace tandem::cli {
namespace {

constexpr std::array<std::string_view, 8> kGpuOps{"ag_gemm",    "ag_wgrad",      "gemm_rs",
                                                  "gemm_ar",    "moe",           "all_reduce",
                                                  "all_gather", "reduce_scatter"};

/// Throws Unsupported for a request that GPUs do not time.
void check_gpu_request(const BenchOptions& options, const BenchRequest& request, int ranks) {
  if (std::ranges::find(kGpuOps, request.op) == kGpuOps.end()) {
    throw Unsupported(request.op + " on GPUs: expected CPU ranks");
  }
  if (!options.timeline.empty()) throw Unsupported("--timeline: expected CPU ranks");
  if (is_moe(request.op) && request.dtype == DType::f32) {
    throw Unsupported("moe in f32 on GPUs: expected bf16");
  }
  if (request.op == "ag_wgrad" && !request.wire.is_none()) {
    throw Unsupported("ag_wgrad with --codec on GPUs: expected none");
  }
  if (!is_gemm(request.op)) return;
  const int64_t unit = int64_t(16 / size_of(request.dtype)) * ranks;
  if (request.n % unit == 0 && request.k % unit == 0) return;
  throw Unsupported(fmt::format("n {} and k {} on {} GPUs: expected multiples of {}", request.n,
                                request.k, ranks, unit));
}

/// Sets the transport of GPUs if none was given, there is no launcher, and the GPUs of this machine
/// time the request. Returns the line that says so, as DeviceChoice::note.
std::string choose_transport(BenchOptions& options) {
  if (!options.transport.empty() || launched()) return "";
  const MoeBench& moe = options.request.moe;
  WorldOptions world;
  world.ranks_per_gpu = options.ranks_per_gpu;
  if (!options.link.empty()) world.link = EmulatedLink::parse(options.link);
  const bool shares = options.ranks_per_gpu > 1;
  // With one rank there is nothing to overlap, so one GPU is not the default.
  world.ranks = options.ranks ? options.ranks
                : moe.ep > 0  ? moe.ep * moe.tp
                : shares      ? options.ranks_per_gpu
                              : 2;
  const auto check_gpus = [&] {
    BenchOptions on_gpus = options;
    on_gpus.transport = "nccl";
    const BenchPlan plan = make_plan(on_gpus);
    for (const BenchRequest& request : plan.requests) {
      check_gpu_request(options, request, plan.world.ranks);
    }
    return 0.0;
  };
  const DeviceChoice choice = default_device(world, {"", check_gpus}, "--transport threads");
  if (choice.on_gpus) options.transport = "nccl";
  return choice.note;
}

/// Output of the results: the table during the run; files rewritten after each shape, so that
/// finished ones are saved; standard output at the end.
class Reports {
 public:
  Reports(const BenchOptions& options, const BenchPlan& plan, const BenchWorld& world)
      : options_(options),
        world_(world),
        table_(plan.requests, world),
        shown_(options.json != "-" && options.csv != "-") {}

  void add(const BenchRequest& request, const BenchResult& result) {
    if (shown_ && all_.empty()) print(table_.header(result, options_.explain));
    if (shown_) print(table_.row(request, result));
    csv_ += to_csv(request, result, world_, all_.empty());
    all_.push_back(to_json(request, result, world_));
    if (options_.json != "-") save(options_.json, json());
    if (options_.csv != "-") save(options_.csv, csv_);
  }
  void end() const {
    if (options_.json == "-") print(json());
    if (options_.csv == "-") print(csv_);
  }

 private:
  static void print(const std::string& text) {
    fmt::print("{}", text);
    finish_output();
  }
  static void save(const std::string& path, const std::string& text) {
    if (!path.empty()) write_output(path, text);
  }
  std::string json() const { return dump_json(all_.size() == 1 ? all_[0] : all_, 1) + "\n"; }

  const BenchOptions& options_;
  const BenchWorld& world_;
  BenchTable table_;
  bool shown_;
  nlohmann::ordered_json all_ = nlohmann::ordered_json::array();
  std::string csv_;
};

void bench_all(const BenchOptions& options, const BenchPlan& plan, Communicator& comm) {
  const BenchWorld world{comm, options.link_label.empty() ? comm.link() : options.link_label};
  std::optional<Reports> reports;  // rank 0 only
  if (comm.rank() == 0) reports.emplace(options, plan, world);
  bool ok = true;
  std::vector<Receipt> receipts;
  for (const BenchRequest& request : plan.requests) {
    const BenchResult result = run_bench(comm, request);
    ok = ok && result.ok();
    if (reports && request.timeline) write_trace(options.timeline, result.timeline);
    if (reports) reports->add(request, result);
    receipts.insert(receipts.end(), result.receipts.begin(), result.receipts.end());
  }
  if (reports) reports->end();
  if (!ok) {
    throw Error(
        fmt::format("bench {}: a result differs from the reference by more than the bound, or "
                    "between runs",
                    options.request.op));
  }
  for (const Receipt& each : receipts) require_as_asked(each, false);
}

void run_on(const std::string& transport, const WorldOptions& world,
            const std::function<void(Communicator&)>& body) {
  if (transport == "nccl") return run_gpus(world, body);
  if (transport == "threads") return run_threads(world, body);
  if (transport == "mpi") return run_mpi(world, body);
  if (transport == "processes") return run_processes(world, body);
  run_world(world, body);
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* command =
      app.add_subcommand("bench", "Time an operator or collective: GEMM alone, serial, overlapped");
  auto options = std::make_shared<BenchOptions>();
  declare(*command, *options);
  add_bench_attention(*command);
  add_bench_paged(*command);
  add_bench_train(*command);
  add_bench_generate(*command);
  add_bench_gemm(*command);
  add_bench_serve(*command);
  add_bench_pipeline(*command);
  add_bench_checkpoint(*command);
  command->callback([options, command] {
    if (!command->get_subcommands().empty()) return;
    if (options->request.op.empty()) {
      throw InvalidArgument(fmt::format("op is missing: {} (see tandem bench --help)",
                                        command->get_option("op")->get_description()));
    }
    now_doing("bench " + options->request.op);
    const std::string choice = choose_transport(*options);
    const BenchPlan plan = make_plan(*options);
    for (const std::string& file : {options->json, options->csv, options->timeline}) {
      if (speaks() && !file.empty() && file != "-") check_writable(file);
    }
    print_choice(choice);
    run_on(options->transport, plan.world,
           with_kernel_threads([&](Communicator& comm) { bench_all(*options, plan, comm); }));
  });
}

}  // namespace tandem::cli
