//! Takes a PTX module apart and writes one kernel of it as a module of its own, free of whatever depends on its
//! neighbours, on paths or on the producer's mood: comments go, labels lose the number of their function.

use anyhow::{Context, Result, bail, ensure};
use std::{collections::BTreeSet, fmt::Write as _};

/// A module: the directives at its top, and what it declares and defines.
pub struct Module {
    header: String,
    items: Vec<Item>,
}

struct Item {
    name: String,
    text: String,
    is_entry: bool,
}

/// What the launch bounds of a kernel are.
pub struct Bounds {
    pub threads: u32,
    pub min_blocks: u32,
    /// The first parameter holds tensor maps, which the copy engine wants at multiples of 64 bytes; rustc cannot say so.
    pub tensor_maps: bool,
}

impl Module {
    pub fn parse(ptx: &str) -> Result<Self> {
        let lines = ptx.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end());
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        let is_header = |line: &&&str| [".version", ".target", ".address_size"].iter().any(|d| line.starts_with(d));
        let header_len = lines.iter().take_while(is_header).count();
        ensure!(header_len == 3, "the module does not start with .version, .target, .address_size");
        let header = lines[..header_len].join("\n") + "\n";

        let mut items = Vec::new();
        let (mut text, mut depth) = (String::new(), 0_usize);
        for line in &lines[header_len..] {
            text.push_str(line);
            text.push('\n');
            for c in line.chars() {
                match c {
                    '{' => depth += 1,
                    '}' => depth = depth.checked_sub(1).context("unbalanced braces")?,
                    _ => {}
                }
            }
            if depth == 0 && line.ends_with(['}', ';']) {
                items.push(Item::new(std::mem::take(&mut text))?);
            }
        }
        ensure!(text.is_empty(), "the module ends within: {text}");
        Ok(Self { header, items })
    }

    /// Names of the kernels.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.items.iter().filter(|item| item.is_entry).map(|item| item.name.as_str())
    }

    /// The kernel `entry`, what it uses, and its bounds.
    pub fn extract(&self, entry: &str, bounds: &Bounds) -> Result<String> {
        let mut used = BTreeSet::from([entry]);
        let mut queue = vec![entry];
        while let Some(name) = queue.pop() {
            for item in self.items.iter().filter(|item| item.name == name) {
                ensure!(
                    !item.text.starts_with(".extern .func"),
                    "{entry} reaches {name}, which has no body: a panic or a library call got into the kernel"
                );
                let known = |word: &&str| self.items.iter().any(|item| item.name == *word);
                queue.extend(words(&item.text).filter(known).filter(|word| used.insert(word)));
            }
        }
        let mut ptx = format!("// Made from kernels-gpu by `cargo xtask ptx`.\n{}", self.header);
        for item in self.items.iter().filter(|item| used.contains(item.name.as_str())) {
            let text = normalized(&item.text);
            if !item.is_entry {
                ptx.push_str(&text);
                continue;
            }
            let Some((head, body)) = text.split_once("\n{\n") else { bail!("{entry} has no body") };
            let Bounds { threads, min_blocks, tensor_maps } = bounds;
            let first = format!(".param .align 8 .b8 {entry}_param_0[");
            ensure!(!tensor_maps || head.contains(&first), "{entry} does not begin with tensor maps");
            let head =
                if *tensor_maps { head.replace(&first, &first.replace("8 .b8", "64 .b8")) } else { head.to_owned() };
            write!(ptx, "{head}\n.maxntid {threads}, 1, 1\n.minnctapersm {min_blocks}\n{{\n{body}")?;
        }
        Ok(ptx)
    }
}

impl Item {
    fn new(text: String) -> Result<Self> {
        let head = text.split(['{', '=', '[']).next().unwrap_or_default();
        let is_entry = head.contains(".entry ");
        let name = match head.split_once('(') {
            // `.func (.param .b32 result) name(…` returns a value.
            Some((before, after)) if before.ends_with(' ') => {
                after.split_once(')').and_then(|(_, rest)| words(rest).next())
            }
            Some((before, _)) => words(before).last(),
            None => words(head).last(),
        };
        let name = name.with_context(|| format!("cannot tell the name of: {text}"))?.to_owned();
        Ok(Self { name, text, is_entry })
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$')).filter(|word| !word.is_empty())
}

/// `$L__BB7_2` → `$L__BB_2`, `__local_depot7` → `__local_depot`: names with function scope. `_RNvCs1a2b_4name1f` →
/// `_RNvC4name1f`: the hash of a crate depends on where the compiler is installed.
fn normalized(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, len)) =
        ["$L__BB", "__local_depot", "Cs"].iter().filter_map(|prefix| Some((rest.find(prefix)?, prefix.len()))).min()
    {
        let (kept, tail) = rest.split_at(at + len);
        result.push_str(kept);
        rest = tail.trim_start_matches(|c: char| c.is_ascii_digit());
        if kept.ends_with("Cs") {
            rest = tail;
            let hash_end = tail.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(tail.len());
            if let Some(path) =
                tail[hash_end..].strip_prefix('_').filter(|path| path.starts_with(|c: char| c.is_ascii_digit()))
            {
                result.pop();
                rest = path;
            }
        }
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "//\n// Generated by a compiler\n//\n\n.version 7.4\n.target sm_80\n.address_size 64\n\n\
        .extern .shared .align 1024 .b8 smem[];\n.global .align 4 .b8 table[4] = {1, 2, 3, 4};\n\
        .extern .func panic\n(\n\t.param .b64 panic_param_0\n)\n;\n\
        .func  (.param .b32 func_retval0) _RNvCs1a2B_7kernels6helper(\n\t.param .b32 _RNvCs1a2B_7kernels6helper_param_0\n)\n{\n\tret;\n\n}\n\
        \t// .globl\tone\n.visible .entry one(\n\t.param .u64 one_param_0\n)\n{\n\tmov.u64 %rd1, smem;\n\
        $L__BB3_1: // %loop\n\tbra $L__BB3_1;\n\t{ // callseq 0, 0\n\tcall.uni (retval0), _RNvCs1a2B_7kernels6helper, (param0);\n\t} // callseq 0\n\tret;\n}\n\
        .visible .entry two(\n\t.param .u64 two_param_0\n)\n{\n\tcall.uni panic, (param0);\n}\n";

    #[test]
    fn a_kernel_takes_what_it_uses_and_nothing_else() {
        let module = Module::parse(MODULE).unwrap();
        assert_eq!(module.entries().collect::<Vec<_>>(), ["one", "two"]);
        let one = module.extract("one", &Bounds { threads: 128, min_blocks: 3, tensor_maps: false }).unwrap();
        assert_eq!(
            one,
            "// Made from kernels-gpu by `cargo xtask ptx`.\n.version 7.4\n.target sm_80\n.address_size 64\n\
             .extern .shared .align 1024 .b8 smem[];\n\
             .func  (.param .b32 func_retval0) _RNvC7kernels6helper(\n\t.param .b32 _RNvC7kernels6helper_param_0\n)\n{\n\tret;\n}\n\
             .visible .entry one(\n\t.param .u64 one_param_0\n)\n.maxntid 128, 1, 1\n.minnctapersm 3\n{\n\tmov.u64 %rd1, smem;\n\
             $L__BB_1:\n\tbra $L__BB_1;\n\t{\n\tcall.uni (retval0), _RNvC7kernels6helper, (param0);\n\t}\n\tret;\n}\n"
        );
    }

    #[test]
    fn a_call_without_a_body_is_an_error() {
        let module = Module::parse(MODULE).unwrap();
        let error = module.extract("two", &Bounds { threads: 1, min_blocks: 1, tensor_maps: false }).unwrap_err();
        assert!(error.to_string().contains("two reaches panic"), "{error}");
    }
}
