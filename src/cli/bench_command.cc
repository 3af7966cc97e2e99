#include <fmt/format.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/bench_options.h"
#include "cli/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/output.h"
#include "cli/usage.h"
#include "core/files.h"
#include "core/json.h"
#include "core/machine.h"
#include "core/output.h"
#include "gemm/gemm.h"
#include "tandem/cuda.h"

namespace tandem::cli {
namespace {

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
  set_kernel_threads(threads_per_rank(comm.size()));
  const BenchWorld world{comm, options.link_label.empty() ? comm.link() : options.link_label};
  std::optional<Reports> reports;  // rank 0 only
  if (comm.rank() == 0) reports.emplace(options, plan, world);
  bool ok = true;
  for (const BenchRequest& request : plan.requests) {
    const BenchResult result = run_bench(comm, request);
    ok = ok && result.ok();
    if (reports && request.timeline) write_trace(options.timeline, result.timeline);
    if (reports) reports->add(request, result);
  }
  if (reports) reports->end();
  if (!ok) {
    throw Error(
        fmt::format("bench {}: a result differs from the reference by more than the bound, or "
                    "between runs",
                    options.request.op));
  }
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
  add_bench_train(*command);
  add_bench_generate(*command);
  add_bench_pipeline(*command);
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
           [&](Communicator& comm) { bench_all(*options, plan, comm); });
  });
}

}  // namespace tandem::cli
