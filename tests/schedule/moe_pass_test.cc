#include "schedule/moe_pass.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace tandem::schedule {
namespace {

using enum MoeStep;

std::string suffix(int chunk) {
  return chunk > 0 ? fmt::format(" {}", chunk) : "";
}

/// "side:send_rows remote 1" of every launch, in order, between "await 0" and "record 0".
std::vector<std::string> list(const MoePass& pass) {
  constexpr std::array<const char*, kMoeSteps> kNames = {
      "notify",      "encode_rows", "send_rows", "push_rows",
      "decode_rows", "permute",     "gather",    "send_and_gather",
      "first",       "swiglu",      "second",    "d_act",
      "gate",        "dx",          "send_sums", "stage_sums",
      "push_sums",   "dw_in",       "dw_out",    "sum_ranks"};
  constexpr std::array<const char*, 3> kRows = {"", " local", " remote"};
  std::vector<std::string> lines;
  for (const PassStep& step : pass) {
    const char* const lane = step.lane == Lane::side ? "side:" : "";
    if (step.before != kNoEvent) lines.push_back(fmt::format("{}await {}", lane, step.before));
    lines.push_back(fmt::format("{}{}{}{}", lane, kNames[size_t(step.step)],
                                kRows[size_t(step.rows)], suffix(step.chunk)));
    if (step.after != kNoEvent) lines.push_back(fmt::format("{}record {}", lane, step.after));
  }
  return lines;
}
using Lines = std::vector<std::string>;

/// Forward pass of GPU ranks as it was enqueued before passes were lists.
struct GpuCandidate {
  bool serial = true, sorts = false, overlaps_sort = false, encodes = false, trains = false,
       pushes = false;
  int ranks = 2, groups = 1;

  bool sends_while_sorting() const { return !serial && overlaps_sort && !encodes; }
  bool overlaps_rows() const { return !serial && !sorts; }
  MoePassForm form() const {
    MoePassForm form{.sends = ranks > 1,
                     .encodes_rows = encodes,
                     .gathers_in_gemm = !sorts,
                     .saves_gathered = trains,
                     .has_gate_step = trains,
                     .column_groups = groups};
    if (serial) return form;
    if (pushes) {
      form.rows = RowExchange::pushed;
      form.sums = SumExchange::pushed;
      return form;
    }
    if (overlaps_rows()) form.rows = RowExchange::overlapped;
    if (sends_while_sorting()) form.rows = RowExchange::while_sorting;
    form.sums = overlaps_sort ? SumExchange::local_last : SumExchange::by_columns;
    return form;
  }
  Lines launches() const {
    Lines all{"notify"};
    const bool on_side = !serial && !overlaps_sort;
    const char* const rows = overlaps_rows() ? "side:" : "";
    if (encodes) all.push_back("encode_rows");
    if (ranks > 1 && !sends_while_sorting()) {
      if (overlaps_rows()) all.insert(all.end(), {"record 0", "side:await 0"});
      all.push_back(fmt::format("{}send_rows", rows));
      if (encodes) all.push_back(fmt::format("{}decode_rows", rows));
      // An event right after a lane's last launch is as good as one recorded when it is awaited.
      if (trains && overlaps_rows()) all.push_back("side:record 1");
    }
    all.push_back("permute");
    if (sends_while_sorting()) {
      all.push_back("send_and_gather");
    } else if (sorts) {
      all.push_back("gather");
    }
    all.push_back("first");
    if (trains) {
      if (!sorts) {
        if (overlaps_rows()) all.push_back("await 1");
        all.push_back("gather");
      }
      all.push_back("swiglu");
    }
    if (!serial && overlaps_sort) {
      all.insert(all.end(), {"second remote", "send_sums", "second local"});
    } else {
      for (int group = 0; group < groups; ++group) {
        all.push_back(fmt::format("second{}", suffix(group)));
        if (on_side) {
          all.push_back(fmt::format("record {}", 3 + group));
          all.push_back(fmt::format("side:await {}", 3 + group));
        }
        if (ranks > 1) {
          all.push_back(fmt::format("{}send_sums{}", on_side ? "side:" : "", suffix(group)));
        }
      }
    }
    if (on_side) all.insert(all.end(), {"side:record 2", "await 2"});
    all.push_back("sum_ranks");
    return all;
  }
};

TEST(MoePass, GpuForwardPassesLaunchInTheirPublishedOrder) {
  int forms = 0;
  for (const bool trains : {false, true}) {
    for (const bool encodes : {false, true}) {
      for (const int ranks : {1, 2}) {
        std::vector<GpuCandidate> candidates{
            {}, {.sorts = true}, {.sorts = true, .overlaps_sort = true}};
        if (ranks > 1) {
          for (const int groups : {1, 2, 4}) {
            candidates.push_back({.serial = false, .groups = groups});
            candidates.push_back({.serial = false, .sorts = true, .groups = groups});
          }
          candidates.push_back({.serial = false, .sorts = true, .overlaps_sort = true});
        }
        for (GpuCandidate c : candidates) {
          if (ranks == 1 && encodes) continue;  // nothing is encoded
          c.trains = trains, c.encodes = encodes, c.ranks = ranks;
          EXPECT_EQ(list(make_forward(c.form())), c.launches());
          ++forms;
        }
      }
    }
  }
  EXPECT_EQ(forms, 46);
}

TEST(MoePass, GpuBackwardPassSendsSumsBeforeTheGradientsOfWeights) {
  MoePassForm form{.has_gate_step = true, .sums = SumExchange::under_weights};
  const Lines expected{"notify", "send_rows", "permute", "gather", "d_act",    "gate",
                       "dx",     "send_sums", "dw_in",   "dw_out", "sum_ranks"};
  EXPECT_EQ(list(make_backward(form)), expected);
  form.sends = false;
  Lines local = expected;
  std::erase_if(local, [](const std::string& line) { return line.starts_with("send"); });
  EXPECT_EQ(list(make_backward(form)), local);
}

TEST(MoePass, CopyEnginesPushOnTheSideLane) {
  GpuCandidate c{.serial = false, .sorts = true, .trains = true, .pushes = true};
  const Lines forward{"notify",         "record 0",      "side:await 0", "side:push_rows",
                      "permute",        "gather",        "first",        "swiglu",
                      "second remote",  "stage_sums",    "record 3",     "side:await 3",
                      "side:push_sums", "side:record 2", "second local", "await 2",
                      "sum_ranks"};
  EXPECT_EQ(list(make_forward(c.form())), forward);
  c.sorts = false;
  Lines gathered = forward;
  std::swap(gathered[5], gathered[6]);  // the GEMM gathers; what it saves is sorted afterwards
  EXPECT_EQ(list(make_forward(c.form())), gathered);
  const Lines backward{"notify",         "record 0",      "side:await 0",
                       "side:push_rows", "permute",       "gather",
                       "d_act",          "gate",          "dx",
                       "stage_sums",     "record 3",      "side:await 3",
                       "side:push_sums", "side:record 2", "dw_in",
                       "dw_out",         "await 2",       "sum_ranks"};
  EXPECT_EQ(list(make_backward(c.form())), backward);
}

TEST(MoePass, ForwardPassesOfCpuRanks) {
  const Lines serial{"notify", "send_rows", "permute",   "gather",
                     "first",  "second",    "send_sums", "sum_ranks"};
  EXPECT_EQ(list(make_forward({})), serial);
  const Lines overlapped{"notify",       "record 0",        "side:await 0",   "side:send_rows",
                         "permute",      "gather local",    "first local",    "gather remote",
                         "first remote", "gather remote 1", "first remote 1", "second remote",
                         "send_sums",    "second remote 1", "send_sums 1",    "second local",
                         "sum_ranks"};
  EXPECT_EQ(list(make_forward({.rows = RowExchange::overlapped,
                               .row_chunks = 2,
                               .sums = SumExchange::local_last,
                               .column_groups = 2})),
            overlapped);
}

TEST(MoePass, OverlappedBackwardPassOfCpuRanks) {
  MoePassForm form{.rows = RowExchange::overlapped,
                   .row_chunks = 2,
                   .sums = SumExchange::local_last,
                   .column_groups = 2};
  Lines expected{"notify",        "send_rows",    "gather local",    "d_act local",    "permute",
                 "gather remote", "d_act remote", "gather remote 1", "d_act remote 1", "dx remote",
                 "send_sums",     "dx remote 1",  "send_sums 1",     "dw_in",          "dw_out",
                 "dx local",      "sum_ranks"};
  EXPECT_EQ(list(make_backward(form)), expected);
  form.local_dx_first = true;
  std::erase(expected, "dx local");
  expected.insert(expected.begin() + 5, "dx local");
  EXPECT_EQ(list(make_backward(form)), expected);
}

// ---- Order of reads after writes ---------------------------------------------------------------

struct Direction {
  const MoePassForm& form;
  bool is_backward = false;
};

/// Steps whose results `step` reads, if the pass has them.
std::vector<MoeStep> needs(MoeStep step, const Direction& of) {
  std::vector<MoeStep> gathered{notify, encode_rows};
  switch (step) {
    case notify:
      return {};
    case encode_rows:
      return {notify};
    case send_rows:
      return {notify, encode_rows};
    case decode_rows:
      return {send_rows};
    case permute:
    case push_rows:
      return {notify};
    case gather:
    case send_and_gather:
      // A backward pass has the positions of the forward pass.
      if (!of.is_backward) gathered.push_back(permute);
      // One after the GEMM takes all SMs: rows must have been sent.
      if (of.form.gathers_in_gemm && !of.is_backward) {
        gathered.insert(gathered.end(), {send_rows, decode_rows});
      }
      return gathered;
    case first:
      if (of.form.gathers_in_gemm) return {permute};
      return {permute, gather, send_and_gather};
    case swiglu:
      return {first};
    case second:
      return {first, swiglu};
    case d_act:
      return {gather};
    case gate:
      return {d_act};
    case dx:
      return {d_act, gate};
    case send_sums:
    case stage_sums:
      return {second, dx};
    case push_sums:
      return {stage_sums};
    case dw_in:
      return {gather, d_act, gate};
    case dw_out:
      return {gather, d_act, gate};
    case sum_ranks:
      return {send_sums, push_sums, second, dx};
  }
  return {};
}

/// Whether two steps of one kind touch the same rows and chunks, as far as a reader cares.
bool covers(const PassStep& writer, const PassStep& reader) {
  if (writer.rows != RowsFrom::all && reader.rows != RowsFrom::all && writer.rows != reader.rows)
    return false;
  const bool by_chunk = (writer.step == gather && (reader.step == first || reader.step == d_act)) ||
                        (writer.step == second && reader.step == send_sums) ||
                        (writer.step == dx && reader.step == send_sums);
  if (writer.step == second || writer.step == dx) {
    const bool sends = reader.step == send_sums || reader.step == stage_sums;
    if (sends && writer.rows == RowsFrom::local) return false;
  }
  return !by_chunk || writer.chunk == reader.chunk;
}

/// First step that is not ordered after one whose results it reads: by its lane, or by an event.
std::string unordered(const MoePass& pass, const Direction& of) {
  const size_t count = pass.size();
  std::vector<std::vector<bool>> before(count, std::vector<bool>(count));
  for (size_t i = 0; i < count; ++i) {
    const auto follow = [&](size_t j) {
      before[i][j] = true;
      for (size_t k = 0; k < count; ++k) before[i][k] = before[i][k] || before[j][k];
    };
    for (size_t j = 0; j < i; ++j) {
      const bool same_lane = pass[j].lane == pass[i].lane;
      const bool by_event = pass[i].before != kNoEvent && pass[j].after == pass[i].before;
      if (same_lane || by_event) follow(j);
    }
    for (const MoeStep needed : needs(pass[i].step, of)) {
      for (size_t j = 0; j < count; ++j) {
        if (pass[j].step != needed || !covers(pass[j], pass[i]) || before[i][j]) continue;
        return fmt::format("{} is not ordered after {}", list({pass[i]}).back(),
                           list({pass[j]}).back());
      }
    }
  }
  return "";
}

std::vector<MoePassForm> forms() {
  std::vector<MoePassForm> all;
  for (int bits = 0; bits < 64; ++bits) {
    for (const RowExchange rows : {RowExchange::serial, RowExchange::overlapped,
                                   RowExchange::while_sorting, RowExchange::pushed}) {
      for (const SumExchange sums :
           {SumExchange::serial, SumExchange::under_weights, SumExchange::by_columns,
            SumExchange::local_last, SumExchange::pushed}) {
        for (const int chunks : {0, 1, 3}) {
          const bool gathers_in_gemm = bits & 2;
          if (rows == RowExchange::pushed && (chunks > 0 || (bits & 1) > 0)) continue;
          if (sums == SumExchange::pushed && (bits & 16) > 0) continue;
          if (gathers_in_gemm && (chunks > 0 || rows == RowExchange::while_sorting)) continue;
          all.push_back({.sends = true,
                         .encodes_rows = (bits & 1) > 0,
                         .gathers_in_gemm = gathers_in_gemm,
                         .saves_gathered = (bits & 4) > 0,
                         .has_gate_step = (bits & 8) > 0,
                         .rows = rows,
                         .row_chunks = chunks,
                         .sums = sums,
                         .column_groups = 1 + (bits & 16) / 8,
                         .local_dx_first = (bits & 32) > 0});
        }
      }
    }
  }
  return all;
}

bool can_go_back(const MoePassForm& form) {
  if (form.rows == RowExchange::while_sorting || form.sums == SumExchange::by_columns) return false;
  const bool overlaps = form.rows == RowExchange::overlapped;
  if (overlaps && (form.row_chunks == 0 || form.has_gate_step)) return false;
  return !form.local_dx_first || (overlaps && form.sums == SumExchange::local_last);
}

TEST(MoePass, EveryStepIsOrderedAfterThoseItReads) {
  int passes = 0;
  for (const MoePassForm& form : forms()) {
    EXPECT_EQ(unordered(make_forward(form), {form}), "");
    ++passes;
    if (!can_go_back(form)) continue;
    EXPECT_EQ(unordered(make_backward(form), {form, true}), "");
    ++passes;
  }
  EXPECT_GT(passes, 1000);
}

/// Control: every wait is necessary.
TEST(MoePass, AMissingWaitIsFound) {
  int waits = 0;
  for (const MoePassForm& form : forms()) {
    const MoePass pass = make_forward(form);
    for (size_t i = 0; i < pass.size(); ++i) {
      if (pass[i].before == kNoEvent) continue;
      MoePass without = pass;
      without[i].before = kNoEvent;
      EXPECT_NE(unordered(without, {form}), "") << list({pass[i]}).back();
      ++waits;
    }
  }
  EXPECT_GT(waits, 500);
}

/// Control: so is a step that comes after those that read its results.
TEST(MoePass, AReadBeforeItsWriteIsFound) {
  for (const MoePassForm& form : forms()) {
    const MoePass pass = make_forward(form);
    for (const MoeStep late : {permute, gather, send_and_gather, first, second}) {
      const bool is_read = late != gather || !form.gathers_in_gemm;
      const auto at = std::ranges::find(pass, late, &PassStep::step);
      if (at == pass.end() || !is_read) continue;
      MoePass moved = pass;
      const auto from = moved.begin() + (at - pass.begin());
      std::rotate(from, from + 1, moved.end());
      EXPECT_NE(unordered(moved, {form}), "") << list({*at}).back();
    }
  }
}

/// Rows, products and gradients are the same in every form, however they are divided.
TEST(MoePass, FormsDoTheSameWork) {
  const auto is_whole = [](const MoePass& pass, MoeStep step, int chunks) {
    std::set<std::pair<RowsFrom, int>> seen;
    for (const PassStep& each : pass) {
      if (each.step == step && !seen.insert({each.rows, each.chunk}).second) return false;
    }
    if (seen.empty()) return false;
    if (seen == std::set<std::pair<RowsFrom, int>>{{RowsFrom::all, 0}}) return true;
    std::set<std::pair<RowsFrom, int>> expected, columns;
    expected.insert({RowsFrom::local, 0});
    for (int i = 0; i < chunks; ++i) {
      expected.insert({RowsFrom::remote, i});
      columns.insert({RowsFrom::all, i});
    }
    return seen == expected || seen == columns;
  };
  for (const MoePassForm& form : forms()) {
    const MoePass forward = make_forward(form);
    EXPECT_TRUE(is_whole(forward, first, form.row_chunks));
    const bool sends_and_gathers = form.rows == RowExchange::while_sorting;
    EXPECT_EQ(std::ranges::count(forward, send_and_gather, &PassStep::step), sends_and_gathers);
    const bool gathers = form.gathers_in_gemm ? form.saves_gathered : !sends_and_gathers;
    EXPECT_EQ(is_whole(forward, gather, form.row_chunks), gathers);
    EXPECT_TRUE(is_whole(forward, second, form.column_groups));
    if (!can_go_back(form)) continue;
    const MoePass backward = make_backward(form);
    EXPECT_TRUE(is_whole(backward, gather, form.row_chunks));
    EXPECT_TRUE(is_whole(backward, d_act, form.row_chunks));
    EXPECT_TRUE(is_whole(backward, dx, form.column_groups));
    for (const MoeStep step : {dw_in, dw_out, sum_ranks}) {
      EXPECT_EQ(std::ranges::count(backward, step, &PassStep::step), 1);
    }
  }
}

/// CPU ranks know the level of all ranks' rows, and with it the form, from `permute` on.
TEST(MoePass, ForwardPassesBeginWithTheSameSteps) {
  const Lines begin{"notify", "send_rows", "permute"};
  for (const RowExchange rows : {RowExchange::serial, RowExchange::overlapped}) {
    for (const SumExchange sums : {SumExchange::serial, SumExchange::local_last}) {
      MoePass pass = make_forward({.rows = rows, .row_chunks = 3, .sums = sums});
      for (PassStep& step : pass) step.lane = Lane::main, step.before = step.after = kNoEvent;
      const Lines all = list(pass);
      EXPECT_TRUE(std::ranges::equal(begin, std::span(all).first(begin.size())));
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
