#include <dnnl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench_options.h"
#include "cli/commands.h"
#include "core/machine.h"
#include "core/version.h"
#include "kernels/gemm.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

/// "tandem bench ..." as it was typed, without the program's directory.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!text.empty() && text.back() == '\0') text.pop_back();
  std::string joined;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\0', begin), text.size());
    std::string word = text.substr(begin, end - begin);
    if (begin == 0) word = word.substr(word.rfind('/') + 1);
    if (word.find_first_of(" \t'\"") != std::string::npos) word = "\"" + word + "\"";
    joined += (joined.empty() ? "" : " ") + word;
    begin = end + 1;
  }
  return joined;
}

Json to_json(const BenchRequest& q, const BenchResult& r, const Communicator& comm,
             const std::string& link) {
  const bool gemm = r.gemm.median_us > 0;
  const dnnl_version_t* dnnl = dnnl_version();
  Json versions = {{"tandem", kVersion},
                   {"onednn", fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch)},
                   {"compiler", kCompiler}};
  if (comm.transport() == "mpi") versions["mpi"] = kMpiVersion;
  const auto ect = [&](double us) { return gemm ? Json(us) : Json(nullptr); };
  return {{"op", q.op},
          {"transport", comm.transport()},
          {"link", link},
          {"ranks", comm.size()},
          {"m", q.m},
          {"n", q.n},
          {"k", q.k},
          {"dtype", name_of(q.dtype)},
          {"bytes", r.bytes},
          {"strategy", "overlapped"},
          {"config", {{"chunks", r.chunks}, {"threads_per_rank", kernel_threads()}}},
          {"codec", nullptr},
          {"baseline", r.baseline},
          {"time_us",
           {{"gemm", r.gemm.median_us},
            {"serial", r.serial.median_us},
            {"overlapped", r.overlapped.median_us},
            {"wire", r.wire.median_us},
            {"limit", r.limit_us()}}},
          {"spread_us",
           {{"gemm", {r.gemm.least_us, r.gemm.most_us}},
            {"serial", {r.serial.least_us, r.serial.most_us}},
            {"overlapped", {r.overlapped.least_us, r.overlapped.most_us}}}},
          {"repeats", q.repeats},
          {"ect_us", {{"serial", ect(r.ect_serial_us)}, {"overlapped", ect(r.ect_overlapped_us)}}},
          {"efficiency", ect(r.efficiency())},
          {"error",
           {{"max_rel", r.max_rel}, {"baseline_max_rel", r.baseline_max_rel}, {"bound", r.bound}}},
          {"bitwise_equal_runs", r.bitwise_equal_runs},
          {"hardware", this_machine().describe()},
          {"versions", versions},
          {"commit", kCommit},
          {"command", command_line()},
          {"date", fmt::format("{:%FT%TZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(
                                                std::chrono::system_clock::now())))}};
}

void print_header(const BenchRequest& q, const BenchResult& r, const Communicator& comm,
                  const std::string& link) {
  fmt::print("{} {}, {} ranks on {} ({}), {} thread{} each, {} repeats\n", q.op, name_of(q.dtype),
             comm.size(), link, comm.transport(), kernel_threads(),
             kernel_threads() == 1 ? "" : "s", q.repeats);
  fmt::print("serial: {}\n", r.baseline);
  fmt::print("{:>6} {:>6} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7} {:>7} {:>9}\n", "M", "N",
             "K", "GEMM us", "serial", "overlap", "wire", "limit", "E", "chunks", "error");
}

void print_row(const BenchRequest& q, const BenchResult& r) {
  const bool gemm = r.gemm.median_us > 0;
  fmt::print(
      "{:>6} {:>6} {:>6} {:>10.0f} {:>10.0f} {:>10.0f} {:>10.0f} {:>10.0f} {:>7} {:>7} "
      "{:>9.1e}{}\n",
      q.m, q.n, q.k, r.gemm.median_us, r.serial.median_us, r.overlapped.median_us, r.wire.median_us,
      r.limit_us(), gemm && r.ect_serial_us > 0 ? fmt::format("{:.2f}", r.efficiency()) : "-",
      r.chunks, r.max_rel, r.ok() ? "" : "  WRONG");
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
  bool ok = true;
  for (const BenchRequest& request : job.requests) {
    const BenchResult result = run_bench(comm, request);
    ok = ok && result.ok();
    if (table && all.empty()) print_header(request, result, comm, link);
    if (table) print_row(request, result);
    if (print) all.push_back(to_json(request, result, comm, link));
  }
  if (print && !options.json.empty()) write(options.json, all.size() == 1 ? all[0] : all);
  if (!ok) {
    throw Error(
        fmt::format("bench {}: a result differs from the reference by more than the bound, or "
                    "between runs",
                    options.request.op));
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* command =
      app.add_subcommand("bench", "Time an operator or collective: GEMM alone, serial, overlapped");
  auto options = std::make_shared<BenchOptions>();
  declare(*command, *options);
  command->callback([options] {
    const BenchJob job = job_of(*options);
    run_world(job.world, [&](Communicator& comm) { bench_all(*options, job, comm); });
  });
}

}  // namespace tandem::cli
