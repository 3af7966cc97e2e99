# Removes from one of CUTE's lists of wgmma instructions those that no kernel here issues, or from
# its selectors the lines that name them. Entries are separated by lines of slashes.
BEGIN {
  RS = "\n////////*\n"
  # The last is the first of every list, which shares an entry with the preamble or is named there.
  kept = "64x[0-9]+x16_F32(BF16BF16|F16F16)_SS|64x(8|16|32|64|128)x16_F32BF16BF16_RS|64x(8|16|32|64|128)x32_F32E4M3E4M3_SS|64x8x(16|32)_F16F16F16_SS"
}
/struct (G?MMA_64x|MMA_Traits<SM90(_|::GMMA::SPARSE::GMMA_)64x)/ && $0 !~ kept &&
  !/\n(namespace|enum|} *\/\/)/ { next }
{
  lines = split($0, line, "\n")
  for (i = 1; i <= lines; ++i) {
    if (line[i] ~ /return SM90::GMMA::/ && line[i] !~ kept)
      line[i] = "        static_assert(sizeof(ElementA) == 0, \"left out by cmake/narrow_instructions.awk\");"
    print line[i]
  }
}
