#include <dnnl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench_options.h"
#include "cli/commands.h"
#include "cli/usage.h"
#include "comm/gpus.h"
#include "core/files.h"
#include "core/machine.h"
#include "core/version.h"
#include "kernels/gemm.h"
#include "tandem/cuda.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

/// As it was typed, without the program's directory.
std::string command_line() {
  std::vector<std::string> words = typed_words();
  if (!words.empty()) words[0] = words[0].substr(words[0].rfind('/') + 1);
  return joined(words);
}

double rounded(double us) {
  return std::round(us * 100) / 100;
}

double share(double of_one) {
  return std::round(of_one * 1e4) / 1e4;
}

Json spread(const BenchTimes& t) {
  return {rounded(t.least_us), rounded(t.most_us)};
}

/// What ran, on which libraries and hardware.
struct Setting {
  Json config, versions;
  std::string hardware;
};

Setting cpu_setting(const BenchResult& r, const Communicator& comm) {
  const dnnl_version_t* dnnl = dnnl_version();
  Setting setting{{{"chunks", r.chunks}, {"threads_per_rank", kernel_threads()}},
                  {{"tandem", kVersion},
                   {"onednn", fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch)},
                   {"compiler", kCompiler}},
                  this_machine().describe()};
  if (comm.transport() == "mpi") setting.versions["mpi"] = kMpiVersion;
  return setting;
}

Setting gpu_setting(const BenchResult& r, const Communicator& comm) {
  const Gpus gpus = this_machines_gpus();
  Json ways = Json::object();
  for (const auto& [name, t] : r.ways) {
    ways[name] = {{"median", rounded(t.median_us)},
                  {"min", rounded(t.least_us)},
                  {"max", rounded(t.most_us)},
                  {"host", rounded(t.host_us)},
                  {"host_burst", rounded(t.host_burst_us)}};
  }
  Setting setting{{{"serial", r.baseline},
                   {"overlapped", r.overlapped_way},
                   {"detail", r.detail},
                   {"cuda_graph", r.graph},
                   {"ways_us", ways}},
                  {{"tandem", kVersion}},
                  gpus.describe(comm.size())};
  for (const auto& [name, version] : gpus.versions) setting.versions[name] = version;
  return setting;
}

bool on_gpus(const Communicator& comm) {
  return comm.transport() == "nccl";
}

/// The operator is its product, and is measured against a bare call of it.
bool is_product(const BenchRequest& q, const BenchResult& r, const Communicator& comm) {
  return on_gpus(comm) && comm.size() == 1 && r.gemm.median_us > 0 && !q.add_norm;
}

Json to_json(const BenchRequest& q, const BenchResult& r, const Communicator& comm,
             const std::string& link) {
  const bool gemm = r.gemm.median_us > 0;
  const Setting setting = on_gpus(comm) ? gpu_setting(r, comm) : cpu_setting(r, comm);
  const auto ect = [&](double us) { return gemm ? Json(rounded(us)) : Json(nullptr); };
  const bool product = is_product(q, r, comm), exposes = gemm && !product && r.exposes();
  const bool faster = !product && r.overlapped.median_us <= r.serial.median_us;
  Json json = {
      {"op", q.op},
      {"transport", comm.transport()},
      {"link", link},
      {"ranks", comm.size()},
      {"m", q.m},
      {"n", q.n},
      {"k", q.k},
      {"dtype", name_of(q.dtype)},
      {"bytes", r.bytes},
      {"strategy", on_gpus(comm) && !faster ? "serial" : "overlapped"},
      {"config", setting.config},
      {"codec", nullptr},
      {"baseline", r.baseline},
      {"time_us",
       {{"gemm", rounded(r.gemm.median_us)},
        {"serial", rounded(r.serial.median_us)},
        {"overlapped", rounded(r.overlapped.median_us)},
        {"wire", rounded(r.wire.median_us)},
        {"limit", rounded(r.limit_us())}}},
      {"spread_us",
       {{"gemm", spread(r.gemm)},
        {"serial", spread(r.serial)},
        {"overlapped", spread(r.overlapped)}}},
      {"repeats", q.repeats},
      {"ect_us", {{"serial", ect(r.ect.serial_us)}, {"overlapped", ect(r.ect.overlapped_us)}}},
      {"efficiency", exposes ? Json(share(r.efficiency())) : Json(nullptr)},
      {"efficiency_95", exposes && r.efficiency_range
                            ? Json{share(r.efficiency_range->low), share(r.efficiency_range->high)}
                            : Json(nullptr)},
      {"error",
       {{"max_rel", r.max_rel}, {"baseline_max_rel", r.baseline_max_rel}, {"bound", r.bound}}},
      {"bitwise_equal_runs", r.bitwise_equal_runs},
      {"hardware", setting.hardware},
      {"versions", setting.versions},
      {"commit", kCommit},
      {"command", command_line()},
      {"date", fmt::format("{:%FT%TZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(
                                            std::chrono::system_clock::now())))}};
  if (q.dtype == DType::e4m3) json["scaling"] = name_of(q.scaling);
  if (q.add_norm) json["add_norm"] = true;
  if (product) json["parity"] = std::round(r.parity() * 1e4) / 1e4;
  if (on_gpus(comm)) {
    json["error"]["max_of_bound"] = r.of_bound;
    json["host_us"] = rounded(r.overlapped.host_us);
    json["host_burst_us"] = rounded(r.overlapped.host_burst_us);
  }
  return json;
}

// What the columns are: the table is to be read without the documentation.
constexpr const char* kCpuLegend =
    R"(Medians of the slowest rank. GEMM: the product alone; wire: the bytes alone; limit: the longer of
both; serial: one after the other, the faster of a plain collective beside a whole GEMM and of the
operator's serial plan; overlap: both at once, in so many chunks of a shard (ran as).
)";
constexpr const char* kGpuLegend =
    R"(Medians of the slowest GPU. GEMM: the product alone; wire: the bytes alone; limit: the longer of
both; serial: one after the other, the fastest way; overlap: both at once, the fastest way; ran as:
overlap's way against serial's.
)";
constexpr const char* kProductLegend =
    R"(E = 1 - (overlap - GEMM) / (serial - GEMM), the communication hidden: 1 is all of it, - where
serial - GEMM is within the noise; +-: half the range of 95 in 100 random draws of the rounds.
error: largest difference from the reference over its largest value.
)";
constexpr const char* kPlainLegend =
    R"(Medians of the slowest rank. baseline: {}; tandem: this library; {}
error: largest difference from the reference over its largest value.
)";

std::string legend(const BenchResult& r, const Communicator& comm) {
  if (r.gemm.median_us == 0) {
    return fmt::format(fmt::runtime(kPlainLegend), r.baseline,
                       on_gpus(comm) ? "ran as: its fastest way." : "wire: the bytes alone;");
  }
  return std::string(on_gpus(comm) ? kGpuLegend : kCpuLegend) + kProductLegend;
}

void print_header(const BenchRequest& q, const BenchResult& r, const Communicator& comm,
                  const std::string& link) {
  const std::string each = on_gpus(comm) ? this_machines_gpus().name
                                         : fmt::format("{} thread{} each", kernel_threads(),
                                                       kernel_threads() == 1 ? "" : "s");
  const bool plain = r.gemm.median_us == 0;
  fmt::print("{}{} {}, {} rank{} on {} ({}), {}, {} repeats\n{}", q.op,
             q.add_norm ? " + residual + RMSNorm" : "", name_of(q.dtype), comm.size(),
             comm.size() == 1 ? "" : "s", link, comm.transport(), each, q.repeats, legend(r, comm));
  fmt::print("{:>6} {:>6} ", "M", "N");
  if (plain) {
    fmt::print("{:>11} {:>10}{} {:>9}{}\n", "baseline us", "tandem us",
               on_gpus(comm) ? "" : "    wire us", "error", on_gpus(comm) ? "  ran as" : "");
  } else {
    fmt::print("{:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>14} {:>9}  {}\n", "K", "GEMM us",
               "serial us", "overlap us", "wire us", "limit us", "E", "error", "ran as");
  }
}

std::string ran_as(const BenchResult& r, bool product) {
  if (product) return fmt::format("product, parity {:.3f}", r.parity());
  if (r.overlapped_way.empty()) {
    return r.chunks ? fmt::format("{} chunk{}", r.chunks, r.chunks == 1 ? "" : "s") : "";
  }
  return fmt::format("{} against {}{}", r.overlapped_way, r.baseline,
                     r.detail.empty() ? "" : " (" + r.detail + ")");
}

std::string hidden(const BenchResult& r) {
  if (!r.exposes()) return "-";
  const std::string value = fmt::format("{:.3f}", r.efficiency());
  if (!r.efficiency_range) return value;
  return fmt::format("{} +-{:.3f}", value,
                     (r.efficiency_range->high - r.efficiency_range->low) / 2);
}

void print_row(const BenchRequest& q, const BenchResult& r, const Communicator& comm) {
  const bool product = is_product(q, r, comm), plain = r.gemm.median_us == 0;
  fmt::print("{:>6} {:>6} ", q.m, q.n);
  if (plain) {
    fmt::print("{:>11.1f} {:>10.1f}", r.serial.median_us, r.overlapped.median_us);
    if (!on_gpus(comm)) fmt::print(" {:>10.1f}", r.wire.median_us);
  } else {
    fmt::print("{:>6} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>14}", q.k,
               r.gemm.median_us, r.serial.median_us, r.overlapped.median_us, r.wire.median_us,
               r.limit_us(), product ? "-" : hidden(r));
  }
  const std::string way = ran_as(r, product);
  fmt::print(" {:>9.1e}{}{}{}\n", r.max_rel, way.empty() ? "" : "  ", way, r.ok() ? "" : "  WRONG");
  std::fflush(stdout);
}

void write(const std::string& path, const Json& json) {
  if (path == "-") {
    fmt::print("{}\n", json.dump(1));
    return;
  }
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw IoError(fmt::format("{}: cannot be written", path));
}

void bench_all(const BenchOptions& options, const BenchJob& job, Communicator& comm) {
  set_kernel_threads(threads_per_rank(comm.size()));
  const std::string link = options.link_label.empty() ? comm.link() : options.link_label;
  const bool print = comm.rank() == 0, table = print && options.json != "-";
  Json all = Json::array();
  bool ok = true, first = true;
  for (const BenchRequest& request : job.requests) {
    const BenchResult result = run_bench(comm, request);
    ok = ok && result.ok();
    if (print && request.timeline) write_trace(options.timeline, result.timeline);
    if (table && first) print_header(request, result, comm, link);
    if (table) print_row(request, result, comm);
    first = false;
    if (!print || options.json.empty()) continue;
    all.push_back(to_json(request, result, comm, link));
    if (table) write(options.json, all.size() == 1 ? all[0] : all);  // what is done is kept
  }
  if (print && !table) write(options.json, all.size() == 1 ? all[0] : all);
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
  run_world(world, body);
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* command =
      app.add_subcommand("bench", "Time an operator or collective: GEMM alone, serial, overlapped");
  auto options = std::make_shared<BenchOptions>();
  declare(*command, *options);
  command->callback([options] {
    const BenchJob job = job_of(*options);
    for (const std::string& file : {options->json, options->timeline}) {
      if (speaks() && !file.empty() && file != "-") check_writable(file);
    }
    run_on(options->transport, job.world,
           [&](Communicator& comm) { bench_all(*options, job, comm); });
  });
}

}  // namespace tandem::cli
