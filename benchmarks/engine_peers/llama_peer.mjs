// The cases of benchmarks.engine in llama.cpp through node-llama-cpp; prints one JSON line.
//
// node llama_peer.mjs MODULES MODEL.gguf THREADS < cases.json     MODULES: the folder node-llama-cpp is installed in

import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import path from "node:path";

const [modules, modelPath, threads] = process.argv.slice(2);
const cases = JSON.parse(readFileSync(0, "utf8"));
const found = createRequire(path.join(modules, "package.json")).resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(found).href);

const most = Math.max(...Object.values(cases).map((each) => each.prompts.length));
const longest = Math.max(...Object.values(cases).flatMap((each) => each.prompts.map((prompt) => prompt.length)));
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});

const seconds = {};
for (const [name, {prompts, decodes, rounds}] of Object.entries(cases)) {
    const context = await model.createContext({
        sequences: prompts.length,
        contextSize: (decodes ? prompts[0].length + rounds : longest) + 64,
        batchSize: Math.max(longest, most),
        threads: Number(threads),
    });
    const sequences = prompts.map(() => context.getSequence());
    seconds[name] = Math.min(...await (decodes ? decode(sequences, prompts, rounds) : prefill(sequences[0], prompts[0], rounds)));
    await context.dispose();
}
console.log(JSON.stringify({seconds}));
process.exit(0);

// A prompt, to its first token; the first round is a warm-up.
async function prefill(sequence, prompt, rounds) {
    const taken = [];
    for (let round = 0; round <= rounds; round++) {
        await sequence.clearHistory();
        const start = performance.now();
        const tokens = sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true});
        await tokens.next();
        taken.push((performance.now() - start) / 1e3);
        await tokens.return();
    }
    return taken.slice(1);
}

// One token of every sequence, all in one batch.
async function decode(sequences, prompts, rounds) {
    const running = sequences.map((sequence, i) => sequence.evaluate(prompts[i], {temperature: 0, yieldEogToken: true}));
    await Promise.all(running.map((tokens) => tokens.next()));
    const taken = [];
    for (let round = 0; round <= rounds; round++) {
        const start = performance.now();
        await Promise.all(running.map((tokens) => tokens.next()));
        taken.push((performance.now() - start) / 1e3);
    }
    return taken.slice(1);
}
