#include <fmt/format.h>

#include <utility>
#include <vector>

#include "bench/bench_rates.h"
#include "bench/output/bench_output.h"
#include "core/version.h"

namespace tandem {
namespace {

/// Quotes `text` if necessary.
std::string field(const std::string& text) {
  if (text.find_first_of(",\"\n") == text.npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

class Fields {
 public:
  void add(const char* name, const std::string& text) { all_.emplace_back(name, field(text)); }
  void add(const char* name, int64_t count) { add(name, std::to_string(count)); }
  void add(const char* name, bool is_known, double value) {
    add(name, is_known ? fmt::format("{:.6g}", value) : std::string());
  }
  std::string line(bool header) const {
    std::string names, values;
    for (const auto& [name, value] : all_) {
      const char* comma = names.empty() ? "" : ",";
      names.append(comma).append(name);
      values.append(comma).append(value);
    }
    return (header ? names + "\n" : "") + values + "\n";
  }

 private:
  std::vector<std::pair<const char*, std::string>> all_;
};

}  // namespace

std::string to_csv(const BenchRequest& q, const BenchResult& r, const BenchWorld& world,
                   bool header) {
  const int ranks = world.comm.size();
  const bool gemm = r.gemm.median_us > 0, exposes = gemm && !is_product(q, r, world) && r.exposes();
  const bool timed = r.codec_times.has_value();
  const bool ranged = exposes && r.efficiency_range;
  const Bandwidth serial = bandwidth(q, ranks, r.serial.median_us),
                  overlapped = bandwidth(q, ranks, r.overlapped.median_us);
  Fields fields;
  fields.add("op", q.op);
  fields.add("transport", std::string(world.comm.transport()));
  fields.add("link", world.link);
  fields.add("ranks", ranks);
  fields.add("m", q.m);
  fields.add("n", q.n);
  fields.add("k", q.k);
  fields.add("dtype", std::string(name_of(q.dtype)));
  fields.add("size_bytes", gemm ? std::string() : std::to_string(matrix_bytes(q)));
  fields.add("codec", q.wire.is_none() ? std::string() : q.wire.describe());
  fields.add("wire_bytes_per_rank", q.wire.is_none() ? r.bytes : r.wire_bytes);
  fields.add("gemm_us", gemm, r.gemm.median_us);
  fields.add("wire_us", r.wire.median_us > 0, r.wire.median_us);
  fields.add("codec_us", timed, timed ? r.codec_times->codec.median_us : 0);
  fields.add("transport_us", timed, timed ? r.codec_times->transport.median_us : 0);
  fields.add("limit_us", gemm || timed, r.limit_us());
  fields.add("nccl_us", r.nccl.has_value(), r.nccl ? r.nccl->median_us : 0);
  fields.add("serial", r.serial_name);
  fields.add("serial_us", true, r.serial.median_us);
  fields.add("serial_min_us", true, r.serial.min_us);
  fields.add("serial_max_us", true, r.serial.max_us);
  fields.add("overlapped", r.overlapped_name);
  fields.add("overlapped_us", true, r.overlapped.median_us);
  fields.add("overlapped_min_us", true, r.overlapped.min_us);
  fields.add("overlapped_max_us", true, r.overlapped.max_us);
  fields.add("ect_serial_us", gemm, r.ect.serial_us);
  fields.add("ect_overlapped_us", gemm, r.ect.overlapped_us);
  fields.add("efficiency_percent", exposes, r.efficiency() * 100);
  fields.add("efficiency_low_percent", ranged, ranged ? r.efficiency_range->low * 100 : 0);
  fields.add("efficiency_high_percent", ranged, ranged ? r.efficiency_range->high * 100 : 0);
  fields.add("serial_tflops_per_rank", gemm, tflops(q, ranks, r.serial.median_us));
  fields.add("overlapped_tflops_per_rank", gemm, tflops(q, ranks, r.overlapped.median_us));
  fields.add("serial_algbw_gb_s", !gemm, serial.algbw);
  fields.add("serial_busbw_gb_s", !gemm, serial.busbw);
  fields.add("overlapped_algbw_gb_s", !gemm, overlapped.algbw);
  fields.add("overlapped_busbw_gb_s", !gemm, overlapped.busbw);
  fields.add("max_rel_error", true, r.max_rel);
  fields.add("repeats", q.repeats);
  fields.add("correct", std::string(r.ok() ? "yes" : "no"));
  fields.add("commit", std::string(kCommit));
  return fields.line(header);
}

}  // namespace tandem
