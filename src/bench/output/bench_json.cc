#include <dnnl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "bench/bench_moe.h"
#include "bench/bench_rates.h"
#include "bench/engine/bench_prefill.h"
#include "bench/output/bench_output.h"
#include "comm/world/gpus.h"
#include "core/system/machine.h"
#include "core/system/process/command_line.h"
#include "core/version.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Command line as typed, without the program's directory.
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
  return {rounded(t.min_us), rounded(t.max_us)};
}

/// Times of every candidate, by name.
Json candidates(const BenchResult& r, bool gpus) {
  Json all = Json::object();
  for (const auto& [name, candidate] : r.candidates) {
    const BenchTimes& t = candidate.times;
    Json& entry = all[name] = {
        {"median", rounded(t.median_us)}, {"min", rounded(t.min_us)}, {"max", rounded(t.max_us)}};
    if (r.gemm.median_us > 0) entry["form"] = name_of(candidate.form);
    if (candidate.encoded) entry["encoded"] = true;
    if (!gpus) continue;
    entry["host"] = rounded(t.host_us);
    entry["host_burst"] = rounded(t.host_burst_us);
  }
  return all;
}

Json cpu_config(const BenchResult& r) {
  return {{"chunks", r.chunks},
          {"threads_per_rank", kernel_threads()},
          {"serial", r.serial_name},
          {"overlapped", r.overlapped_name},
          {"candidates_us", candidates(r, false)}};
}

Json gpu_config(const BenchResult& r) {
  return {{"serial", r.serial_name},
          {"overlapped", r.overlapped_name},
          {"detail", r.detail},
          {"cuda_graph", r.graph},
          {"candidates_us", candidates(r, true)}};
}

Json times(const BenchResult& r) {
  Json us = {{"gemm", rounded(r.gemm.median_us)}, {"serial", rounded(r.serial.median_us)}};
  if (r.nccl) us["nccl"] = rounded(r.nccl->median_us);
  us["overlapped"] = rounded(r.overlapped.median_us);
  us["wire"] = rounded(r.wire.median_us);
  if (r.codec_times) {
    us["wire_encoded"] = rounded(r.codec_times->wire.median_us);
    us["codec"] = rounded(r.codec_times->codec.median_us);
    us["transport"] = rounded(r.codec_times->transport.median_us);
  }
  us["limit"] = rounded(r.limit_us());
  return us;
}

/// Relative overhead over the bare GEMM.
Json over_gemm(const BenchRequest& q, const BenchResult& r) {
  Json all = {{"serial", share(r.over_gemm(r.serial))},
              {"overlapped", share(r.over_gemm(r.overlapped))}};
  if (q.wire.is_none()) return all;
  if (const auto uncompressed = r.fastest_uncompressed())
    all["uncompressed"] = share(r.over_gemm(uncompressed->times));
  if (const auto as = r.fastest_encoded()) all["encoded"] = share(r.over_gemm(as->times));
  return all;
}

/// With a codec: the fastest overlapped candidate without it, and the fastest one with it.
Json compared(const BenchResult& r, bool exposes) {
  Json all = Json::object();
  const auto add = [&](const char* key, const std::optional<NamedTimes>& one) {
    if (!one) return;
    all[key] = {{"name", one->name}, {"us", rounded(one->times.median_us)}};
    if (r.gemm.median_us <= 0) return;
    all[key]["efficiency"] = exposes ? Json(share(r.efficiency_of(one->times))) : Json(nullptr);
  };
  add("uncompressed",
      r.gemm.median_us > 0 ? r.fastest_uncompressed() : NamedTimes{r.serial_name, r.serial});
  add("encoded", r.fastest_encoded());
  return all;
}

Json bandwidths(const BenchRequest& q, const BenchResult& r, int ranks) {
  const auto of = [&](const BenchTimes& times) {
    const Bandwidth rate = bandwidth(q, ranks, times.median_us);
    return Json{{"algbw", rounded(rate.algbw)}, {"busbw", rounded(rate.busbw)}};
  };
  return {{"serial", of(r.serial)}, {"overlapped", of(r.overlapped)}};
}

}  // namespace

Json codec_json(const Wire& wire, DType dtype) {
  if (wire.is_none()) return nullptr;
  return {{"name", name_of(wire.codec)},
          {"group", wire.group},
          {"text", wire.describe()},
          {"bits_per_element", wire.bits_per_element(dtype)}};
}

Json origin_json(const Communicator& comm) {
  Json versions = {{"tandem", kVersion}};
  std::string hardware;
  if (comm.on_gpu()) {
    const Gpus gpus = this_machines_gpus();
    hardware = gpus.describe(count_gpus(comm));
    for (const auto& [name, version] : gpus.versions) versions[name] = version;
  } else {
    const dnnl_version_t* dnnl = dnnl_version();
    hardware = this_machine().describe();
    versions["onednn"] = fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch);
    versions["compiler"] = kCompiler;
    if (comm.transport() == "mpi") versions["mpi"] = kMpiVersion;
  }
  return {{"hardware", hardware},
          {"versions", versions},
          {"commit", kCommit},
          {"command", command_line()},
          {"date", fmt::format("{:%FT%TZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(
                                                std::chrono::system_clock::now())))}};
}

bool is_product(const BenchRequest& q, const BenchResult& r, const BenchWorld& world) {
  return world.on_gpus() && world.comm.size() == 1 && r.gemm.median_us > 0 && !q.add_norm;
}

Json to_json(const BenchRequest& q, const BenchResult& r, const BenchWorld& world) {
  const Communicator& comm = world.comm;
  const bool gemm = r.gemm.median_us > 0, gpus = world.on_gpus();
  const auto ect = [&](double us) { return gemm ? Json(rounded(us)) : Json(nullptr); };
  const bool product = is_product(q, r, world), exposes = gemm && !product && r.exposes();
  const bool faster = !product && r.overlapped.median_us <= r.serial.median_us;
  const Strategy form = is_prefill(q.op)  ? r.candidates.at(r.overlapped_name).form
                        : gpus && !faster ? Strategy::serial
                                          : Strategy::overlapped;
  Json json = {
      {"op", q.op},
      {"transport", comm.transport()},
      {"link", world.link},
      {"ranks", comm.size()},
      {"m", q.m},
      {"n", q.n},
      {"k", q.k},
      {"dtype", name_of(q.dtype)},
      {"bytes", r.bytes},
      {"strategy", name_of(form)},
      {"config", gpus ? gpu_config(r) : cpu_config(r)},
      {"codec", codec_json(q.wire, q.dtype)},
      {"baseline", r.baseline},
      {"time_us", times(r)},
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
      {"bitwise_equal_runs", r.bitwise_equal_runs}};
  json.update(origin_json(comm));
  if (q.dtype == DType::e4m3) json["scaling"] = name_of(q.scaling);
  if (q.add_norm) json["add_norm"] = true;
  if (!q.wire.is_none()) {
    json["wire_bytes"] = r.wire_bytes;
    json["compared"] = compared(r, exposes);
  }
  if (gemm && !product) json["over_gemm"] = over_gemm(q, r);
  if (!gemm && !is_gemm(q.op)) {
    json["data"] = data_of(q) == BenchData::normal ? "standard normal" : "uniform in [-1, 1)";
    json["bandwidth_gb_s"] = bandwidths(q, r, comm.size());
  }
  if (!r.receipts.empty()) {
    json["receipt"] = r.receipts.size() == 1 ? to_json(r.receipts.front()) : to_json(r.receipts);
  }
  if (is_moe(q.op)) {
    json["model"] = q.moe.model;
    json["hidden_scale"] = q.moe.scale;
    json["experts"] = q.moe.experts;
    json["top_k"] = q.moe.top_k;
    json["ep"] = comm.size() / q.moe.tp;
    json["tp"] = q.moe.tp;
    json["tokens"] = q.m;
    const MoeImbalance imbalance = measured_imbalance(q, comm.size());
    json["imbalance"] = share(imbalance.of_ranks);
    json["expert_imbalance"] = share(imbalance.of_experts);
    json["backward"] = q.moe.backward;
    if (q.moe.backward) json["save"] = name_of(q.moe.save);
    if (r.saved_bytes > 0) json["bytes_saved"] = r.saved_bytes;
  }
  if (is_prefill(q.op)) json["layers"] = q.layers;
  if (product) json["parity"] = std::round(r.parity() * 1e4) / 1e4;
  if (gpus) {
    json["error"]["max_of_bound"] = r.of_bound;
    json["host_us"] = rounded(r.overlapped.host_us);
    json["host_burst_us"] = rounded(r.overlapped.host_burst_us);
  }
  return json;
}

}  // namespace tandem
