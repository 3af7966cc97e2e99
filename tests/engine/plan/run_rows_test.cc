// CSV files of runs: what they may leave open, and errors that name the row and the column.
#include <gtest/gtest.h>

#include <string>

#include "engine/plan/fit/run_rows.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

const std::string kNames =
    "id,model,layers,hidden,heads,ffn,vocab,seq,gpu,gpus,precision,tp,pp,mbs,gbs,step_s,tokens_s_"
    "gpu,"
    "notes\n";

RunRow parse_one(const std::string& values) {
  return parse_rows(kNames + values, "runs.csv").at(0);
}

std::string error_of(const std::string& text) {
  try {
    parse_rows(text, "runs.csv");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(RunRows, EmptyFieldsAreDerived) {
  const RunRow row = parse_one("a,GPT,24,2048,16,8192,51200,2048,H100,64,bf16,2,4,1,256,,10000,\n");
  EXPECT_EQ(row.dp, 8);
  EXPECT_EQ(row.grad_accum, 32);
  EXPECT_EQ(row.kv_heads, 16);
  EXPECT_EQ(row.head_dim, 128);
  EXPECT_EQ(row.vpp, 6);  // one layer a chunk
  ASSERT_TRUE(row.step_s);
  EXPECT_TRUE(row.step_derived);
  EXPECT_DOUBLE_EQ(*row.step_s, 256. * 2048 / 64 / 10000);
}

TEST(RunRows, StatedStepIsPreferredToRates) {
  EXPECT_EQ(*parse_one("a,GPT,24,2048,16,8192,51200,2048,H100,8,bf16,1,1,1,8,2.5,1,\n").step_s,
            2.5);
}

TEST(RunRows, QuotesLineEndsAndUnknownColumnsAreAccepted) {
  const auto rows = parse_rows(
      "\xef\xbb\xbfunknown,gpus,gpu,model,precision,seq,gbs,tp,notes\r\n"
      "1,8,H100,Qwen3-235B,bf16,4096,8,1,\"two\nlines, \"\"quoted\"\"\"\r\n\r\n"
      ",16,H100,Qwen3-235B,bf16,4096,16,1,\n",
      "runs.csv");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].notes, "two\nlines, \"quoted\"");
  EXPECT_EQ(rows[1].id, "line 5");
  EXPECT_EQ(rows[1].layers, 94);  // published
  EXPECT_EQ(rows[1].experts, 128);
}

TEST(RunRows, LayersOfProxiesStay) {
  EXPECT_EQ(parse_one("a,Grok-1,4,,,,,4096,H100,16,bf16,4,1,1,64,,,\n").layers, 4);
}

TEST(RunRows, RowsThatCannotBeModelledSayWhy) {
  EXPECT_EQ(parse_one("a,Unknown,,,,,,4096,H100,16,bf16,4,1,1,64,,,\n").skipped, "no layers");
  EXPECT_EQ(parse_one("a,GPT,24,2048,16,8192,51200,2048,H100,8,bf16,,,1,8,1,,\n").skipped,
            "no layout");
  EXPECT_EQ(parse_one("a,GPT,24,2048,16,8192,51200,2048,H100,8,bf16,1,1,1,,1,,\n").skipped,
            "no gbs");
  EXPECT_EQ(parse_one("a,GPT,24,2048,16,8192,51200,2048,H100,8,bf16,4,4,1,8,1,,\n").skipped,
            "tp x pp x cp is 16 of 8 gpus");
}

TEST(RunRows, ErrorsNameRowAndColumn) {
  const std::string good = "a,GPT,24,2048,16,8192,51200,2048,H100,8,bf16,1,1,1,8,1,,\n";
  EXPECT_EQ(error_of(kNames + good + "b,GPT,24,wide,16,8192,51200,2048,H100,8,bf16,1,1,1,8,1,,\n"),
            "runs.csv:3 (b): column hidden: wide: expected a positive number or nothing");
  EXPECT_EQ(error_of(kNames + "b,GPT,24,1,16,8192,51200,2048,H100,8,bf16,1,1,1,8,-1,,\n"),
            "runs.csv:2 (b): column step_s: -1: expected a positive number or nothing");
  EXPECT_EQ(error_of(kNames + "b,GPT\n"),
            "runs.csv:2: 2 fields: expected 18, as in the first line");
  EXPECT_EQ(error_of(kNames + "b,\"GPT\n"),
            "runs.csv:2: a quote without end: expected one more \"");
  EXPECT_EQ(error_of(kNames), "runs.csv: no rows: expected at least one below the names");
  EXPECT_EQ(error_of("id,model\na,b\n"),
            "runs.csv: no column gpu: expected a CSV file with the columns of "
            "bench/published/runs.csv");
  EXPECT_EQ(error_of("model,gpu,gpus,precision,seq,gbs,experts_topk\nm,H100,8,bf16,1,1,8\n"),
            "runs.csv:2: column experts_topk: 8: expected EXPERTS/TOPK, as in 128/8");
}

TEST(RowFilter, ComparesTextByItsBeginningAndNumbers) {
  RunRow row;
  row.gpu = "H100-80GB";
  row.gpus = 512;
  for (const char* holds : {"", "gpu=H100", "gpu!=A100", "gpus=512", "gpus<=512,gpus>=512",
                            "gpus<1024,gpus>256", "gpu=H100,gpus!=8"})
    EXPECT_TRUE(RowFilter(holds).matches(row)) << holds;
  for (const char* fails : {"gpu=A100", "gpus=51", "gpus<512", "gpus>512", "gpu=H100,gpus<=8"})
    EXPECT_FALSE(RowFilter(fails).matches(row)) << fails;
  EXPECT_THROW(RowFilter("gpus"), InvalidArgument);
  EXPECT_THROW(RowFilter("gpuss=8"), InvalidArgument);
  EXPECT_THROW(RowFilter("gpus<many"), InvalidArgument);
}

}  // namespace
}  // namespace tandem::plan
