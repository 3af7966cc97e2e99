#include <fmt/format.h>

#include <algorithm>

#include "bench/bench_moe.h"
#include "bench/bench_rates.h"
#include "bench/bench_receipt.h"
#include "bench/engine/bench_prefill.h"
#include "bench/output/bench_output.h"
#include "comm/world/gpus.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

constexpr const char* kProductColumns =
    R"(  MxNxK     tokens x output features x input features of the whole product
  GEMM      the product alone, without any communication
  wire      the bytes alone
  limit     the longer of both: no call can take less
  serial    the fastest form that does not overlap the two, ours or a library's
  overlap   the fastest form that does
  TFLOP/s   2 M N K / ranks over the time of overlap: what each rank computes
  E         1 - (overlap - GEMM) / (serial - GEMM): how much of the communication is hidden. 100 %
            is all of it; below 0 overlap is slower than serial; - is printed where serial - GEMM
            is within the noise. +-: half the range of 95 in 100 random draws of the rounds
  error     largest difference from the unfused reference over its largest value
)";
constexpr const char* kCollectiveColumns =
    R"(  bytes     of the whole MxN matrix
  MxN       rows x columns of that matrix
  {:<9} {}
  tandem    this library
  algbw     bytes over time, GB/s
  busbw     algbw times what one link carries of each byte, GB/s, as nccl-tests define it:
            2 (ranks - 1) / ranks for all_reduce, 1 for broadcast, else (ranks - 1) / ranks
  error     largest difference from the reference over its largest value
)";
constexpr const char* kCpuCollectiveColumn = "  wire      the uncompressed bytes alone\n";
constexpr const char* kGpuCollectiveColumn = "  ran as    the algorithm that was taken\n";
constexpr const char* kCodecLine =
    R"(The line below a row is of an encoded call and of what it cannot be faster than, timed alone in the
same rounds:
  wire      its encoded bytes on the link, without codec (the column wire: uncompressed)
  codec     encoding and decoding as much as a call does on a rank; nothing is sent or added
  transport moving those bytes with no other rank and no link: between hosts through the kernel's
            loopback, pages lent and copied out, on other transports one copy in memory
  limit     the longer of wire and codec + transport, which share the rank's core
)";

constexpr const char* kGpuCodecLine =
    R"(The column "uncompressed" is the fastest form without the codec, NCCL's or ours, and tandem the encoded
one. The line below a row compares the two, and says what each GPU sends.
)";
constexpr const char* kReceiptLine =
    R"(A line "... would run as serial" says why an operator that chooses among these times does not
overlap.
)";
constexpr const char* kNormalLine =
    R"(The data are standard normal values: how many bytes the format saves depends on them.
)";
constexpr const char* kComparedLine =
    R"(The last line has the fastest form with the codec and the fastest overlapped one without it: how much
longer each takes than the GEMM, and its E.
)";

std::string microseconds(double us) {
  return us < 99999.95 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us);
}

/// Three significant digits.
std::string rate(double value) {
  return fmt::format("{:.{}f}", value, value < 1 ? 3 : value < 10 ? 2 : value < 100 ? 1 : 0);
}

std::string size_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  int unit = 0;
  while (unit < 4 && bytes >= 1024 && bytes % 1024 == 0) bytes /= 1024, ++unit;
  return fmt::format("{}{}", bytes, kUnits[unit]);
}

std::string percent(const BenchResult& r) {
  if (!r.exposes()) return "-";
  const std::string value = fmt::format("{:.1f}", r.efficiency() * 100);
  if (!r.efficiency_range || r.efficiency() < -9.99) return value + " %";
  const double half = (r.efficiency_range->high - r.efficiency_range->low) * 50;
  return fmt::format("{}+-{:.1f} %", value, half);
}

std::string shape_text(const BenchRequest& q, bool collective) {
  return collective ? fmt::format("{}x{}", q.m, q.n) : fmt::format("{}x{}x{}", q.m, q.n, q.k);
}

constexpr size_t kColumns = 100;

/// Joins `fields` in lines of at most kColumns.
std::string indented(const std::vector<std::string>& fields) {
  std::string text = "   ";
  size_t begin = 0;
  for (const std::string& field : fields) {
    if (text.size() - begin + 1 + field.size() > kColumns) {
      begin = text.size() + 1;
      text += "\n   ";
    }
    text += " " + field;
  }
  return text;
}

/// Encoded call compared with the uncompressed ones and its limit.
std::string codec_line(const BenchResult& r) {
  const CodecTimes& t = *r.codec_times;
  const double us = r.overlapped.median_us;
  return indented(
             {fmt::format("{:.2f}x the speed without codec, {:.2f}x fewer bytes;",
                          r.serial.median_us / us, double(r.bytes) / double(r.wire_bytes)),
              fmt::format("wire {}, codec {} + transport {}:", microseconds(t.wire.median_us),
                          microseconds(t.codec.median_us), microseconds(t.transport.median_us)),
              fmt::format("{:.0f} % of the limit", r.limit_us() / us * 100)}) +
         "\n";
}

/// codec_line on GPUs, where components are not timed separately.
std::string gpu_codec_line(const BenchResult& r) {
  const double us = r.overlapped.median_us;
  std::vector<std::string> fields{
      fmt::format("{:.2f}x the speed of {}", r.serial.median_us / us, r.serial_name)};
  if (r.nccl) fields.push_back(fmt::format("({:.2f}x NCCL's),", r.nccl->median_us / us));
  fields.push_back(fmt::format("{:.2f}x fewer bytes:", double(r.bytes) / double(r.wire_bytes)));
  fields.push_back(fmt::format("{} GB/s sent", rate(double(r.wire_bytes) / us / 1e3)));
  return indented(fields) + "\n";
}

/// Operator with a wire format compared with the same without it.
std::string compared_line(const BenchResult& r) {
  std::vector<std::string> fields;
  const auto add = [&](const char* which, const std::optional<NamedTimes>& one) {
    if (!one) return;
    const std::string hidden =
        r.exposes() ? fmt::format(", E {:.1f} %", r.efficiency_of(one->times) * 100) : "";
    fields.push_back(fmt::format("{} {} ({}): GEMM {:+.1f} %{};", which,
                                 microseconds(one->times.median_us), one->name,
                                 r.over_gemm(one->times) * 100, hidden));
  };
  add("encoded", r.fastest_encoded());
  add("uncompressed", r.fastest_uncompressed());
  if (fields.empty()) return "";
  fields.back().pop_back();
  return indented(fields) + "\n";
}

/// Column name of a collective's baseline.
const char* baseline_head(const BenchRequest& q, const BenchResult& r, const BenchWorld& world) {
  if (world.on_gpus()) return q.wire.is_none() ? "NCCL" : "uncompressed";
  if (r.serial_name == "uncompressed") return "uncompressed";
  return r.serial_name == "mpi" ? "MPI" : "direct";
}

}  // namespace

BenchTable::BenchTable(std::span<const BenchRequest> requests, const BenchWorld& world)
    : first_(requests.front()), world_(world), collective_(!is_gemm(first_.op)) {
  shape_width_ = collective_ ? 5 : 7;
  for (const BenchRequest& q : requests) {
    shape_width_ = std::max(shape_width_, shape_text(q, collective_).size());
  }
}

std::string BenchTable::header(const BenchResult& first, bool explain) const {
  const Communicator& comm = world_.comm;
  const std::string each = world_.on_gpus() ? this_machines_gpus().name
                                            : fmt::format("{} thread{} each", kernel_threads(),
                                                          kernel_threads() == 1 ? "" : "s");
  const std::string wire = first_.wire.is_none() ? "" : " as " + first_.wire.describe();
  std::string text = fmt::format(
      "{}{} {}{}, {} rank{} on {} ({}), {}, {} repeats\n", first_.op,
      first_.add_norm ? " + residual + RMSNorm" : "", name_of(first_.dtype), wire, comm.size(),
      comm.size() == 1 ? "" : "s", world_.link, comm.transport(), each, first_.repeats);
  if (is_moe(first_.op)) {
    const MoeBench& moe = first_.moe;
    text += fmt::format(
        "{}{}: {} experts, top-{}, ep {} x tp {}, imbalance {:.2f}, {}; GEMM has SwiGLU\n",
        moe.model, moe.scale > 1 ? fmt::format(" with its widths divided by {}", moe.scale) : "",
        moe.experts, moe.top_k, comm.size() / moe.tp, moe.tp,
        measured_imbalance(first_, comm.size()).of_ranks,
        moe.backward ? "forward and backward" : "forward");
  }
  if (is_prefill(first_.op)) {
    text += fmt::format("Time to first token: {} layers, MLPs of width N, K hidden features\n",
                        first_.layers);
  }
  text += fmt::format("Times in us{}: medians of the slowest rank.{}\n",
                      collective_ ? ", bandwidths in GB/s" : "",
                      explain ? "" : " --explain says what the columns are.");
  if (explain && collective_) {
    text += fmt::format(fmt::runtime(kCollectiveColumns), baseline_head(first_, first, world_),
                        first.baseline);
    text += world_.on_gpus() ? kGpuCollectiveColumn : kCpuCollectiveColumn;
    if (first.codec_times) text += kCodecLine;
    if (world_.on_gpus() && !first_.wire.is_none()) text += kGpuCodecLine;
    if (data_of(first_) == BenchData::normal) text += kNormalLine;
  } else if (explain) {
    text += kProductColumns;
    text += world_.on_gpus()
                ? "The line below a row names the two candidates, and the serial form by NCCL.\n"
                : "  chunks    transfers of each shard when overlapped\n";
    if (!first_.wire.is_none()) text += kComparedLine;
    text += kReceiptLine;
    if (is_prefill(first_.op)) {
      text += "Of prefill, overlap is the fastest form of all, which is what generate chooses.\n";
    }
  }
  if (!collective_) {
    return text + fmt::format("{:>{}} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>13} {:>7}{}\n",
                              "MxNxK", shape_width_, "GEMM", "wire", "limit", "serial", "overlap",
                              "TFLOP/s", "E", "error", world_.on_gpus() ? "" : " chunks");
  }
  return text + fmt::format("{:>7} {:>{}} {:>12} {:>7} {:>7} {:>9} {:>7} {:>7}{} {:>7}{}\n",
                            "bytes", "MxN", shape_width_, baseline_head(first_, first, world_),
                            "algbw", "busbw", "tandem", "algbw", "busbw",
                            world_.on_gpus() ? "" : "      wire", "error",
                            world_.on_gpus() ? "  ran as" : "");
}

std::string BenchTable::row(const BenchRequest& request, const BenchResult& result) const {
  return collective_ ? collective_row(request, result) : product_row(request, result);
}

std::string BenchTable::product_row(const BenchRequest& q, const BenchResult& r) const {
  const bool product = is_product(q, r, world_);
  std::string text =
      fmt::format("{:>{}} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>13} {:>7.1e}",
                  shape_text(q, false), shape_width_, microseconds(r.gemm.median_us),
                  microseconds(r.wire.median_us), microseconds(r.limit_us()),
                  microseconds(r.serial.median_us), microseconds(r.overlapped.median_us),
                  rate(tflops(q, world_.comm.size(), r.overlapped.median_us)),
                  product ? "-" : percent(r), r.max_rel);
  if (!world_.on_gpus()) text += fmt::format(" {:>6}", r.chunks);
  if (!r.ok()) text += "  WRONG";
  const bool compares = !q.wire.is_none() && world_.comm.size() > 1;
  const std::string last = (compares ? compared_line(r) : "") + receipt_lines(r.receipts, kColumns);
  if (!world_.on_gpus()) return text + "\n" + last;
  std::vector<std::string> fields;
  if (product) {
    fields.push_back(
        fmt::format("the product alone, at {:.1f} % of a bare call's speed", r.parity() * 100));
  } else {
    fields.push_back(fmt::format("{} against {}", r.overlapped_name, r.serial_name));
    if (r.nccl) fields.push_back(fmt::format("(NCCL {})", microseconds(r.nccl->median_us)));
  }
  if (!r.detail.empty()) fields.push_back(r.detail);
  return text + "\n" + indented(fields) + "\n" + last;
}

std::string BenchTable::collective_row(const BenchRequest& q, const BenchResult& r) const {
  const int ranks = world_.comm.size();
  const Bandwidth baseline = bandwidth(q, ranks, r.serial.median_us),
                  ours = bandwidth(q, ranks, r.overlapped.median_us);
  std::string text =
      fmt::format("{:>7} {:>{}} {:>12} {:>7} {:>7} {:>9} {:>7} {:>7}", size_text(matrix_bytes(q)),
                  shape_text(q, true), shape_width_, microseconds(r.serial.median_us),
                  rate(baseline.algbw), rate(baseline.busbw), microseconds(r.overlapped.median_us),
                  rate(ours.algbw), rate(ours.busbw));
  if (!world_.on_gpus()) text += fmt::format(" {:>9}", microseconds(r.wire.median_us));
  text += fmt::format(" {:>7.1e}", r.max_rel);
  if (world_.on_gpus()) text += "  " + r.overlapped_name;
  text += std::string(r.ok() ? "" : "  WRONG") + "\n";
  if (r.codec_times) return text + codec_line(r);
  const bool compares = world_.on_gpus() && r.wire_bytes > 0;
  return compares ? text + gpu_codec_line(r) : text;
}

}  // namespace tandem
