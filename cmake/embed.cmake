# cmake -DOUT=file.cc -DHEADER=x.h -DFILES=name=path,name=path -P embed.cmake
# Writes a source file that defines each name as the text of its file.
set(code "// Generated.\n#include \"${HEADER}\"\n\nnamespace tandem {\n")
string(REPLACE "," ";" FILES "${FILES}")
foreach(pair IN LISTS FILES)
  string(REGEX MATCH "^([^=]+)=(.+)$" matched "${pair}")
  set(name "${CMAKE_MATCH_1}")
  file(READ "${CMAKE_MATCH_2}" text)
  string(APPEND code "const std::string_view ${name} = R\"embedded(${text})embedded\";\n")
endforeach()
file(WRITE "${OUT}" "${code}}  // namespace tandem\n")
